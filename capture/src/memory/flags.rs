//! `VmFlags` of a mapping: each that a kernel knows is put back by a restart, or follows from what is mapped, or keeps
//! the checkpoint from being taken. One that is not here is of a later kernel, and what it means is not known.

use belay_image::model::VmaKind;

/// What becomes of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Restart puts it back.
    Kept,
    /// It comes back by itself: with the protection, the file, or the kind of the mapping; or it is the kernel's own
    /// affair, or belay's.
    Follows,
    /// It cannot be had: why.
    Refused(&'static str),
}

use Fate::{Follows, Kept, Refused};

const USERFAULTFD: Fate = Refused("is registered with a userfaultfd, which cannot be saved");

/// In the order of the kernel's list (`show_smap_vma_flags`).
const FATES: [(&str, Fate); 38] = [
    // Access now, and what may be asked for.
    ("rd", Follows),
    ("wr", Follows),
    ("ex", Follows),
    ("sh", Follows),
    ("mr", Follows),
    ("mw", Follows),
    ("me", Follows),
    ("ms", Follows),
    ("gd", Kept),
    // Pages of a device or of the kernel.
    ("pf", Follows),
    ("dw", Follows),
    ("lo", Kept),
    ("io", Follows),
    ("sr", Kept),
    ("rr", Kept),
    ("dc", Kept),
    ("de", Follows),
    ("lf", Kept),
    // Counted against what the kernel has promised.
    ("ac", Follows),
    ("nr", Kept),
    ("ht", Kept),
    ("sf", Refused("is mapped with MAP_SYNC, which cannot be saved")),
    ("ar", Follows),
    ("wf", Kept),
    ("dd", Kept),
    // Marks of written pages.
    ("sd", Follows),
    ("mm", Follows),
    ("hg", Kept),
    ("nh", Kept),
    ("mg", Kept),
    ("um", USERFAULTFD),
    // Belay itself finds written pages by it; where the program does, its userfaultfd is refused.
    ("uw", Follows),
    ("ui", USERFAULTFD),
    (
        "ss",
        Refused("is a shadow stack, which cannot be saved; start the program without (GLIBC_TUNABLES=glibc.cpu.x86_shstk=off)"),
    ),
    ("dp", Kept),
    // Guard regions are looked for page by page.
    ("gu", Follows),
    ("sl", Kept),
    // Earlier kernels have no name for the second of two that go together: what is locked, page by page.
    ("??", Follows),
];

/// Those of `flags` that restart puts back on a mapping of this kind, or why it cannot be restored.
pub(crate) fn kept(flags: &[String], kind: &VmaKind) -> Result<Vec<String>, String> {
    if matches!(kind, VmaKind::Vdso(_) | VmaKind::Vsyscall) {
        return Ok(Vec::new());
    }
    let has = |flag: &str| flags.iter().any(|f| f == flag);
    if has("ht") && !matches!(kind, VmaKind::HugeTlb { .. } | VmaKind::Shared { .. }) {
        return Err("is a private mapping of a file in huge pages (hugetlbfs), which cannot be saved".into());
    }
    let mut out = Vec::new();
    for flag in flags {
        let fate = FATES.iter().find(|(name, _)| name == flag).map(|(_, fate)| *fate);
        match fate {
            Some(Kept) => out.push(flag.clone()),
            Some(Follows) if flag != "??" || has("lo") => {}
            Some(Refused(why)) => return Err(why.into()),
            Some(Follows) | None => return Err(format!("has a mark of the kernel that belay does not know ({flag})")),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn what_is_not_known_is_refused() {
        let heap = |text: &str| kept(&words(text), &VmaKind::Heap);
        assert_eq!(heap("rd wr mr mw me ac sd nh rr"), Ok(words("nh rr")));
        assert_eq!(heap("rd wr lo ??"), Ok(words("lo")));
        for unknown in ["zz", "??", "bt", "mt", ""] {
            let why = heap(&format!("rd wr {unknown}"));
            assert_eq!(why.is_err(), !unknown.is_empty(), "{unknown}");
        }
        for refused in ["um", "ui", "ss", "sf", "ht"] {
            assert!(heap(&format!("rd {refused}")).is_err(), "{refused}");
        }
        let huge = VmaKind::HugeTlb { page_bytes: 2 << 20 };
        assert_eq!(kept(&words("rd wr ht"), &huge), Ok(words("ht")));
        let vdso = VmaKind::Vdso("vvar".into());
        assert_eq!(kept(&words("rd pf io de dd zz"), &vdso), Ok(Vec::new()));
    }

    #[test]
    fn each_flag_is_decided_about_once() {
        for (i, (flag, _)) in FATES.iter().enumerate() {
            assert!(flag.len() == 2 && !FATES[..i].iter().any(|(f, _)| f == flag), "{flag}");
        }
    }

    #[test]
    fn this_process_has_no_flag_that_is_not_known() {
        let own = belay_kernel::proc::smaps(std::process::id().cast_signed()).unwrap();
        for map in own
            .iter()
            .filter(|m| m.ino == 0 && !m.name.as_encoded_bytes().starts_with(b"[v"))
        {
            assert_eq!(kept(&map.flags, &VmaKind::Heap).err(), None, "{}", map.name.display());
        }
    }
}
