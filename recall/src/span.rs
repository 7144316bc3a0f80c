//! Lists of memory, and copies from one to another.

/// Some memory. Whoever makes one sees to it that it is there and may be used as it is used; see [`crate::History::put_spans`].
#[derive(Debug, Clone, Copy)]
pub struct Span {
    at: *mut u8,
    len: usize,
}

// SAFETY: a plain address; those who use it uphold what its maker has promised, on whatever thread.
unsafe impl Send for Span {}

impl Span {
    /// Memory that begins at `at`.
    pub fn new(at: *mut u8, len: usize) -> Self {
        Self { at, len }
    }

    /// Memory that is only read from.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self::new(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Memory that is written to.
    pub(crate) fn of_mut(bytes: &mut [u8]) -> Self {
        Self::new(bytes.as_mut_ptr(), bytes.len())
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// It has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its first `len` bytes, and the others.
    fn split(self, len: usize) -> (Span, Span) {
        let len = len.min(self.len);
        let rest = Span::new(self.at.wrapping_add(len), self.len - len);
        (Span::new(self.at, len), rest)
    }

    /// # Safety
    /// The memory is there, and nobody writes to it meanwhile.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: as promised by the caller.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }

    /// # Safety
    /// The memory is there, and nobody else uses it meanwhile.
    pub(crate) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

/// Takes lists of memory in pieces.
pub(crate) struct Cursor<'a> {
    spans: &'a [Span],
    rest: Span,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(spans: &'a [Span]) -> Self {
        Self {
            spans,
            rest: Span::new(std::ptr::null_mut(), 0),
        }
    }

    /// The next piece, of at most `max` bytes; empty at the end.
    pub(crate) fn next(&mut self, max: usize) -> Span {
        while self.rest.is_empty() {
            let Some((first, others)) = self.spans.split_first() else {
                return self.rest;
            };
            (self.rest, self.spans) = (*first, others);
        }
        let (piece, rest) = self.rest.split(max);
        self.rest = rest;
        piece
    }

    /// Pieces that have `len` bytes together, or all that is left.
    pub(crate) fn block(&mut self, len: usize) -> Vec<Span> {
        let (mut left, mut pieces) = (len, Vec::new());
        while left > 0 {
            let piece = self.next(left);
            if piece.is_empty() {
                break;
            }
            left -= piece.len();
            pieces.push(piece);
        }
        pieces
    }
}

/// Copies from list to list, until one of them ends.
///
/// # Safety
/// All memory is there. Nobody writes to `from` nor uses `to` meanwhile, and they do not overlap.
pub(crate) unsafe fn copy(from: &[Span], to: &[Span]) {
    let (mut from, mut to) = (Cursor::new(from), Cursor::new(to));
    let mut source = from.next(usize::MAX);
    while !source.is_empty() {
        let target = to.next(source.len());
        if target.is_empty() {
            return;
        }
        let (now, rest) = source.split(target.len());
        // SAFETY: as promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(now.at, target.at, target.len()) };
        source = if rest.is_empty() { from.next(usize::MAX) } else { rest };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_other_pieces_are_copied() {
        let from: Vec<u8> = (0..100).collect();
        let mut to = vec![0u8; 100];
        let pieces = |lens: &[usize], all: Span| {
            let mut rest = all;
            let cut = lens.iter().map(|l| {
                let (piece, others) = rest.split(*l);
                rest = others;
                piece
            });
            cut.collect::<Vec<_>>()
        };
        let source = pieces(&[1, 0, 60, 39], Span::of(&from));
        let target = pieces(&[33, 33, 0, 34], Span::of_mut(&mut to));
        // SAFETY: both are there, and nobody else has them.
        unsafe { copy(&source, &target) };
        assert_eq!(from, to);
        let mut cursor = Cursor::new(&source);
        let blocks: Vec<usize> = (0..4).map(|_| cursor.block(30).iter().map(Span::len).sum()).collect();
        assert_eq!(blocks, [30, 30, 30, 10]);
    }
}
