//! The functions that a vDSO exports, from its dynamic symbol table. The bytes may come from an image: nothing in them
//! is believed. Pure.

/// Most symbols that are looked at; vDSOs have about a dozen.
const MOST_SYMBOLS: usize = 1024;
const PROGRAM_HEADER: usize = 56;
const SYMBOL: usize = 24;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const STT_FUNC: u8 = 2;
const SHN_UNDEF: u16 = 0;
const SHN_ABS: u16 = 0xfff1;

/// An exported function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Function {
    /// Its name without the prefix `__vdso_`: the names with and without it are those of one function.
    pub(crate) name: String,
    /// Its first byte, counted from the start of the image.
    pub(crate) at: usize,
}

/// The functions in ascending order of place and name, each name once for a place. `Err` says what the image lacks.
pub(crate) fn functions(image: &[u8]) -> Result<Vec<Function>, &'static str> {
    let image = Image::new(image)?;
    let symbols = image.dynamic(DT_SYMTAB).ok_or("it has no symbols")?;
    let names = image.dynamic(DT_STRTAB).ok_or("its symbols have no names")?;
    let count = image.symbols().ok_or("its symbols are not counted")?;
    let mut out = Vec::new();
    for i in 0..count.min(MOST_SYMBOLS) {
        let at = symbols.checked_add(i * SYMBOL).ok_or("a symbol lies outside")?;
        let entry = image
            .bytes
            .get(at..)
            .and_then(|b| b.get(..SYMBOL))
            .ok_or("a symbol lies outside")?;
        let section = half(entry, 6).unwrap_or(SHN_UNDEF);
        if entry[4] & 0xf != STT_FUNC || matches!(section, SHN_UNDEF | SHN_ABS) {
            continue;
        }
        let name = word(entry, 0).and_then(|n| names.checked_add(n as usize));
        let name = name.and_then(|at| image.string(at)).ok_or("a symbol has no name")?;
        let at = long(entry, 8)
            .and_then(|value| image.place(value))
            .ok_or("a function lies outside")?;
        let name = name.strip_prefix("__vdso_").unwrap_or(name).to_owned();
        out.push(Function { name, at });
    }
    out.sort_by(|a, b| (a.at, &a.name).cmp(&(b.at, &b.name)));
    out.dedup();
    Ok(out)
}

struct Image<'a> {
    bytes: &'a [u8],
    /// Address of the first byte.
    base: u64,
    dynamic: &'a [u8],
}

impl<'a> Image<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, &'static str> {
        // 64-bit, little endian.
        if !bytes.starts_with(b"\x7fELF\x02\x01") {
            return Err("it is no ELF object of this architecture");
        }
        let headers = long(bytes, 32)
            .and_then(|at| usize::try_from(at).ok())
            .ok_or("it has no program headers")?;
        let count = usize::from(half(bytes, 56).unwrap_or(0));
        let table = bytes.get(headers..).unwrap_or_default();
        let segments = || table.chunks_exact(PROGRAM_HEADER).take(count);
        let of = |kind| segments().find(|h| word(h, 0) == Some(kind));
        let load = of(PT_LOAD).ok_or("it has no segment")?;
        let base = long(load, 16).unwrap_or(0).wrapping_sub(long(load, 8).unwrap_or(0));
        let dynamic = of(PT_DYNAMIC).ok_or("it has no dynamic section")?;
        let range = long(dynamic, 8).zip(long(dynamic, 32));
        let range = range.and_then(|(at, length)| Some(usize::try_from(at).ok()?..usize::try_from(at.checked_add(length)?).ok()?));
        let dynamic = range.and_then(|r| bytes.get(r)).ok_or("its dynamic section lies outside")?;
        Ok(Self { bytes, base, dynamic })
    }

    /// Where in the image the byte at `address` lies.
    fn place(&self, address: u64) -> Option<usize> {
        let at = usize::try_from(address.wrapping_sub(self.base)).ok()?;
        (at < self.bytes.len()).then_some(at)
    }

    /// Where in the image the table with `tag` lies.
    fn dynamic(&self, tag: u64) -> Option<usize> {
        let mut entries = self.dynamic.chunks_exact(16).map(|e| (long(e, 0), long(e, 8)));
        let found = entries.find(|(t, _)| *t == Some(tag) || *t == Some(0))?;
        if found.0 == Some(tag) {
            self.place(found.1?)
        } else {
            None
        }
    }

    /// Number of symbols: of the chains in the older table of hashes, or else where the last chain of the newer one ends.
    fn symbols(&self) -> Option<usize> {
        if let Some(at) = self.dynamic(DT_HASH) {
            return word(self.bytes, at.checked_add(4)?).map(|n| n as usize);
        }
        let at = self.dynamic(DT_GNU_HASH)?;
        let head = |i: usize| word(self.bytes, at.checked_add(4 * i)?).map(|w| w as usize);
        let (buckets, first, bloom) = (head(0)?, head(1)?, head(2)?);
        let buckets_at = at.checked_add(16)?.checked_add(bloom.checked_mul(8)?)?;
        let chains_at = buckets_at.checked_add(buckets.checked_mul(4)?)?;
        let table = self.bytes.get(buckets_at..chains_at)?;
        let mut last = table.chunks_exact(4).filter_map(|b| word(b, 0)).max()? as usize;
        if last < first {
            return Some(first);
        }
        // A chain ends at an odd word; the walk ends with the image at the latest.
        while word(self.bytes, chains_at.checked_add((last - first).checked_mul(4)?)?)? & 1 == 0 {
            last += 1;
        }
        Some(last + 1)
    }

    fn string(&self, at: usize) -> Option<&'a str> {
        let rest = self.bytes.get(at..)?;
        let end = rest.iter().position(|b| *b == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    }
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vdso_of_this_kernel_has_the_functions_of_all() {
        let code = belay_kernel::vdso::code().unwrap();
        let found = functions(&code).unwrap();
        for wanted in ["clock_gettime", "gettimeofday", "time", "getcpu", "clock_getres"] {
            assert_eq!(found.iter().filter(|f| f.name == wanted).count(), 1, "{wanted}");
        }
    }

    /// The tag of the older table of hashes, made unknown: the newer one gives the same count.
    #[test]
    fn symbols_are_counted_by_either_table() {
        let mut code = belay_kernel::vdso::code().unwrap();
        let all = functions(&code).unwrap();
        let image = Image::new(&code).unwrap();
        let at = image.dynamic.as_ptr() as usize - code.as_ptr() as usize;
        let entries = image.dynamic.len() / 16;
        let place = |tag: u64| (0..entries).map(|i| at + 16 * i).find(|i| long(&code, *i) == Some(tag));
        let both = (place(DT_HASH), place(DT_GNU_HASH));
        if let (Some(hash), Some(_)) = both {
            code[hash..hash + 8].copy_from_slice(&u64::MAX.to_le_bytes());
            assert_eq!(functions(&code).unwrap(), all);
        }
    }

    #[test]
    fn damage_ends_in_a_reason_and_not_in_a_panic() {
        let code = belay_kernel::vdso::code().unwrap();
        assert!(functions(b"\x7fELF\x02\x01").is_err());
        assert!(functions(&[]).is_err());
        for end in (0..code.len()).step_by(7) {
            drop(functions(&code[..end]));
        }
        // What is read first: headers, hashes, symbols, dynamic section.
        for at in 0..0x600.min(code.len()) {
            for value in [0, 0x7f, 0xff] {
                let mut bad = code.clone();
                bad[at] = value;
                drop(functions(&bad));
            }
        }
    }
}
