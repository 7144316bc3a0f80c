//! The functions that a vDSO exports, from its dynamic symbol table. The bytes may come from an image: nothing in them
//! is believed. Pure.

use object::elf::{self, Dyn64, DynamicTag, FileHeader64, Sym64};
use object::read::elf::{Dyn, FileHeader, GnuHashTable, HashTable, ProgramHeader, Sym};
use object::{pod, LittleEndian, StringTable};

/// Most symbols that are looked at; vDSOs have about a dozen.
const MOST_SYMBOLS: usize = 1024;

type Header = FileHeader64<LittleEndian>;

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
    let e = LittleEndian;
    let image = Image::new(image)?;
    let symbols = image.table(elf::DT_SYMTAB).ok_or("it has no symbols")?;
    let names = image.table(elf::DT_STRTAB).ok_or("its symbols have no names")?;
    let count = image.symbols().ok_or("its symbols are not counted")?;
    let symbols = pod::slice_from_bytes::<Sym64<LittleEndian>>(&image.bytes[symbols..], count.min(MOST_SYMBOLS));
    let (symbols, _) = symbols.map_err(|()| "a symbol lies outside")?;
    let names = StringTable::new(image.bytes, names as u64, image.bytes.len() as u64);
    let mut out = Vec::new();
    for symbol in symbols {
        let nowhere = [elf::SHN_UNDEF, elf::SHN_ABS].contains(&symbol.st_shndx(e));
        if symbol.st_type() != elf::STT_FUNC || nowhere {
            continue;
        }
        let name = symbol.name(e, names).ok().and_then(|name| std::str::from_utf8(name).ok());
        let name = name.ok_or("a symbol has no name")?;
        let at = image.place(symbol.st_value(e)).ok_or("a function lies outside")?;
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
    dynamic: &'a [Dyn64<LittleEndian>],
}

impl<'a> Image<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, &'static str> {
        let e = LittleEndian;
        let head = Header::parse(bytes).and_then(|head| head.endian().map(|_| head));
        let head = head.map_err(|_| "it is no ELF object of this architecture")?;
        let segments = head.program_headers(e, bytes).map_err(|_| "it has no program headers")?;
        let load = segments
            .iter()
            .find(|p| p.p_type(e) == elf::PT_LOAD)
            .ok_or("it has no segment")?;
        let base = load.p_vaddr(e).wrapping_sub(load.p_offset(e));
        let dynamic = segments.iter().find_map(|p| p.dynamic(e, bytes).transpose());
        let dynamic = dynamic.ok_or("it has no dynamic section")?;
        let dynamic = dynamic.map_err(|_| "its dynamic section lies outside")?;
        Ok(Self { bytes, base, dynamic })
    }

    /// Where in the image the byte at `address` lies.
    fn place(&self, address: u64) -> Option<usize> {
        let at = usize::try_from(address.wrapping_sub(self.base)).ok()?;
        (at < self.bytes.len()).then_some(at)
    }

    /// Where in the image the table with `tag` lies.
    fn table(&self, tag: DynamicTag) -> Option<usize> {
        let e = LittleEndian;
        let mut entries = self.dynamic.iter().take_while(|d| d.d_tag(e) != elf::DT_NULL);
        entries.find(|d| d.d_tag(e) == tag).and_then(|d| self.place(d.d_val(e)))
    }

    /// Number of symbols, by the older table of hashes, or else by the newer one.
    fn symbols(&self) -> Option<usize> {
        let e = LittleEndian;
        let count = if let Some(at) = self.table(elf::DT_HASH) {
            HashTable::<Header>::parse(e, &self.bytes[at..]).ok()?.symbol_table_length()
        } else {
            let at = self.table(elf::DT_GNU_HASH)?;
            GnuHashTable::<Header>::parse(e, &self.bytes[at..])
                .ok()?
                .symbol_table_length(e)?
        };
        usize::try_from(count).ok()
    }
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
        let place = |tag: DynamicTag| {
            image
                .dynamic
                .iter()
                .position(|d| d.d_tag(LittleEndian) == tag)
                .map(|i| at + 16 * i)
        };
        let both = (place(elf::DT_HASH), place(elf::DT_GNU_HASH));
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
