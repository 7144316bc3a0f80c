//! Lists of memory, and copies from one to another.

/// Some memory, borrowed: to read from, or to write to.
pub(crate) trait Bytes: Default {
    fn len(&self) -> usize;

    /// Its first `len` bytes, of which there are so many, and the others.
    fn split(self, len: usize) -> (Self, Self);
}

impl Bytes for &[u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    fn split(self, len: usize) -> (Self, Self) {
        self.split_at(len)
    }
}

impl Bytes for &mut [u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    fn split(self, len: usize) -> (Self, Self) {
        self.split_at_mut(len)
    }
}

/// Takes lists of memory in pieces.
pub(crate) struct Cursor<B, I> {
    spans: I,
    rest: B,
}

/// From a list to read from.
pub(crate) fn reading<'a, 'b>(spans: &'a [&'b [u8]]) -> Cursor<&'a [u8], impl Iterator<Item = &'a [u8]> + use<'a, 'b>> {
    Cursor::new(spans.iter().map(|s| &**s))
}

/// From a list to write to.
pub(crate) fn writing<'a, 'b>(
    spans: &'a mut [&'b mut [u8]],
) -> Cursor<&'a mut [u8], impl Iterator<Item = &'a mut [u8]> + use<'a, 'b>> {
    Cursor::new(spans.iter_mut().map(|s| &mut **s))
}

impl<B: Bytes, I: Iterator<Item = B>> Cursor<B, I> {
    fn new(spans: I) -> Self {
        Self {
            spans,
            rest: B::default(),
        }
    }

    /// The next piece, of at most `max` bytes; empty at the end.
    pub(crate) fn next(&mut self, max: usize) -> B {
        while self.rest.len() == 0 {
            let Some(next) = self.spans.next() else {
                return B::default();
            };
            self.rest = next;
        }
        let rest = std::mem::take(&mut self.rest);
        let len = max.min(rest.len());
        let (piece, rest) = rest.split(len);
        self.rest = rest;
        piece
    }

    /// Pieces that have `len` bytes together, or all that is left.
    pub(crate) fn block(&mut self, len: usize) -> Vec<B> {
        let (mut left, mut pieces) = (len, Vec::new());
        while left > 0 {
            let piece = self.next(left);
            if piece.len() == 0 {
                break;
            }
            left -= piece.len();
            pieces.push(piece);
        }
        pieces
    }
}

/// Copies from list to list, until one of them ends.
pub(crate) fn copy(from: &[&[u8]], to: &mut [&mut [u8]]) {
    let (mut from, mut to) = (reading(from), writing(to));
    let mut source = from.next(usize::MAX);
    while !source.is_empty() {
        let target = to.next(source.len());
        if target.is_empty() {
            return;
        }
        let (now, rest) = source.split_at(target.len());
        target.copy_from_slice(now);
        source = if rest.is_empty() { from.next(usize::MAX) } else { rest };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces<B: Bytes>(lens: &[usize], mut rest: B) -> Vec<B> {
        let cut = lens.iter().map(|len| {
            let (piece, others) = std::mem::take(&mut rest).split(*len);
            rest = others;
            piece
        });
        cut.collect()
    }

    #[test]
    fn lists_of_other_pieces_are_copied() {
        let from: Vec<u8> = (0..100).collect();
        let mut to = vec![0u8; 100];
        let source = pieces(&[1, 0, 60, 39], from.as_slice());
        copy(&source, &mut pieces(&[33, 33, 0, 34], to.as_mut_slice()));
        assert_eq!(from, to);
        let mut cursor = reading(&source);
        let blocks: Vec<usize> = (0..4).map(|_| cursor.block(30).iter().map(|b| b.len()).sum()).collect();
        assert_eq!(blocks, [30, 30, 30, 10]);
    }
}
