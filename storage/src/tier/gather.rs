//! Gathers what is written into pieces of one size: devices and servers far away take few large writes better than many small ones.

use belay_kernel::direct::Buffer;

/// What has not been sent yet.
#[derive(Debug)]
pub struct Gather {
    buf: Buffer,
    piece: usize,
}

impl Gather {
    /// Into pieces of `piece` bytes (at least one).
    pub fn new(piece: usize) -> Self {
        let buf = Buffer::default();
        Self {
            buf,
            piece: piece.max(1),
        }
    }

    /// Appends `data`. Each piece that is whole goes to `send`, which may take it out of the buffer; the first error ends it.
    pub fn add<E>(&mut self, mut data: &[u8], mut send: impl FnMut(&mut Buffer) -> Result<(), E>) -> Result<(), E> {
        while !data.is_empty() {
            let (now, later) = data.split_at(data.len().min(self.piece - self.buf.len()));
            self.buf.extend_from_slice(now);
            data = later;
            if self.buf.len() == self.piece {
                send(&mut self.buf)?;
                self.buf.clear();
            }
        }
        Ok(())
    }

    /// What is left, less than a piece. From here on it is empty.
    pub fn rest(&mut self) -> Buffer {
        std::mem::take(&mut self.buf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_and_hold_all_in_order() {
        let data: Vec<u8> = (0..=255).collect();
        for piece in [0, 1, 7, 64, 256, 300] {
            for part in [1, 5, 64, 256] {
                let mut gather = Gather::new(piece);
                let mut sent = Vec::new();
                let mut send = |p: &mut Buffer| {
                    assert_eq!(p.len(), piece.max(1));
                    sent.extend_from_slice(p);
                    Ok::<(), ()>(())
                };
                data.chunks(part).for_each(|d| gather.add(d, &mut send).unwrap());
                let rest = gather.rest();
                assert!(rest.len() < piece.max(1));
                sent.extend_from_slice(&rest);
                assert_eq!(sent, data, "{piece}, {part}");
            }
        }
    }
}
