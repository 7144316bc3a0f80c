//! The processor: which instructions programs may choose by asking it (`cpuid`), and how it lays out registers beyond
//! the general ones (XSAVE).

use std::arch::x86_64::{__cpuid_count, _xgetbv, CpuidResult};
use std::sync::OnceLock;

/// A part of the extended state, from number 2 on: what lies before has one place on all processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Component {
    /// Its number (bit of XCR0).
    pub number: u32,
    /// Where it lies in the standard form of the XSAVE area, bytes.
    pub offset: u32,
    /// Its length, bytes.
    pub bytes: u32,
}

/// Whether the system uses protection keys of memory (`pkeys(7)`, OSPKE).
pub fn has_protection_keys() -> bool {
    const OSPKE: u32 = 1 << 4;
    __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).ecx & OSPKE != 0
}

/// Register of a `cpuid` answer.
#[derive(Clone, Copy)]
enum Register {
    A,
    B,
    C,
    D,
}

use Register::{A, B, C, D};

/// Instructions that libraries choose by asking: leaf, part, register, bit, name as Linux has it. Not what only the
/// kernel can use, nor what merely says that something is fast, nor what leaves a trace in the extended state of each
/// thread that uses it (protection keys, AMX).
const FEATURES: [(u32, u32, Register, u32, &str); 72] = [
    (1, 0, C, 0, "pni"),
    (1, 0, C, 1, "pclmulqdq"),
    (1, 0, C, 9, "ssse3"),
    (1, 0, C, 12, "fma"),
    (1, 0, C, 13, "cx16"),
    (1, 0, C, 19, "sse4_1"),
    (1, 0, C, 20, "sse4_2"),
    (1, 0, C, 22, "movbe"),
    (1, 0, C, 23, "popcnt"),
    (1, 0, C, 25, "aes"),
    (1, 0, C, 27, "osxsave"),
    (1, 0, C, 28, "avx"),
    (1, 0, C, 29, "f16c"),
    (1, 0, C, 30, "rdrand"),
    (7, 0, B, 0, "fsgsbase"),
    (7, 0, B, 3, "bmi1"),
    (7, 0, B, 5, "avx2"),
    (7, 0, B, 8, "bmi2"),
    (7, 0, B, 11, "rtm"),
    (7, 0, B, 16, "avx512f"),
    (7, 0, B, 17, "avx512dq"),
    (7, 0, B, 18, "rdseed"),
    (7, 0, B, 19, "adx"),
    (7, 0, B, 21, "avx512ifma"),
    (7, 0, B, 23, "clflushopt"),
    (7, 0, B, 24, "clwb"),
    (7, 0, B, 26, "avx512pf"),
    (7, 0, B, 27, "avx512er"),
    (7, 0, B, 28, "avx512cd"),
    (7, 0, B, 29, "sha_ni"),
    (7, 0, B, 30, "avx512bw"),
    (7, 0, B, 31, "avx512vl"),
    (7, 0, C, 1, "avx512vbmi"),
    (7, 0, C, 5, "waitpkg"),
    (7, 0, C, 6, "avx512_vbmi2"),
    (7, 0, C, 8, "gfni"),
    (7, 0, C, 9, "vaes"),
    (7, 0, C, 10, "vpclmulqdq"),
    (7, 0, C, 11, "avx512_vnni"),
    (7, 0, C, 12, "avx512_bitalg"),
    (7, 0, C, 14, "avx512_vpopcntdq"),
    (7, 0, C, 22, "rdpid"),
    (7, 0, C, 27, "movdiri"),
    (7, 0, C, 28, "movdir64b"),
    (7, 0, D, 2, "avx512_4vnniw"),
    (7, 0, D, 3, "avx512_4fmaps"),
    (7, 0, D, 8, "avx512_vp2intersect"),
    (7, 0, D, 14, "serialize"),
    (7, 0, D, 23, "avx512_fp16"),
    (7, 1, A, 0, "sha512"),
    (7, 1, A, 1, "sm3"),
    (7, 1, A, 2, "sm4"),
    (7, 1, A, 4, "avx_vnni"),
    (7, 1, A, 5, "avx512_bf16"),
    (7, 1, A, 7, "cmpccxadd"),
    (7, 1, A, 23, "avx_ifma"),
    (7, 1, D, 4, "avx_vnni_int8"),
    (7, 1, D, 5, "avx_ne_convert"),
    (7, 1, D, 10, "avx_vnni_int16"),
    (7, 1, D, 19, "avx10"),
    (0xd, 1, A, 1, "xsavec"),
    (0xd, 1, A, 2, "xgetbv1"),
    (0x8000_0001, 0, C, 0, "lahf_lm"),
    (0x8000_0001, 0, C, 5, "abm"),
    (0x8000_0001, 0, C, 6, "sse4a"),
    (0x8000_0001, 0, C, 11, "xop"),
    (0x8000_0001, 0, C, 16, "fma4"),
    (0x8000_0001, 0, C, 21, "tbm"),
    (0x8000_0001, 0, D, 27, "rdtscp"),
    (0x8000_0001, 0, D, 31, "3dnow"),
    (0x8000_0008, 0, B, 0, "clzero"),
    (0x8000_0008, 0, B, 4, "rdpru"),
];

/// All zeros where the processor does not know the leaf.
fn ask(leaf: u32, part: u32) -> CpuidResult {
    let most = |of: u32, part: u32| __cpuid_count(of, part);
    let known = leaf <= most(leaf & 0x8000_0000, 0).eax && (leaf != 7 || part <= most(7, 0).eax);
    if known {
        __cpuid_count(leaf, part)
    } else {
        CpuidResult {
            eax: 0,
            ebx: 0,
            ecx: 0,
            edx: 0,
        }
    }
}

/// The features of [this processor](self), in a fixed order.
pub fn features() -> &'static [&'static str] {
    static OWN: OnceLock<Vec<&'static str>> = OnceLock::new();
    OWN.get_or_init(|| {
        let mut leaves: Vec<((u32, u32), CpuidResult)> = Vec::new();
        let mut has = |leaf, part, register, bit: u32| {
            let known = leaves.iter().find(|(l, _)| *l == (leaf, part)).map(|(_, r)| *r);
            let answer = known.unwrap_or_else(|| {
                let answer = ask(leaf, part);
                leaves.push(((leaf, part), answer));
                answer
            });
            let word = match register {
                A => answer.eax,
                B => answer.ebx,
                C => answer.ecx,
                D => answer.edx,
            };
            word >> bit & 1 != 0
        };
        let own = FEATURES
            .iter()
            .filter(|(leaf, part, register, bit, _)| has(*leaf, *part, *register, *bit));
        own.map(|f| f.4).collect()
    })
}

/// Where this processor and kernel have the parts of the extended state that programs may use.
pub fn components() -> &'static [Component] {
    static OWN: OnceLock<Vec<Component>> = OnceLock::new();
    OWN.get_or_init(|| {
        // SAFETY: asked only where the kernel has switched XSAVE on.
        let parts = || unsafe { enabled() };
        let enabled = features().contains(&"osxsave").then(parts).unwrap_or(0);
        let of = |number: u32| {
            let CpuidResult { eax, ebx, .. } = ask(0xd, number);
            Component {
                number,
                offset: ebx,
                bytes: eax,
            }
        };
        (2..63)
            .filter(|n| enabled >> n & 1 != 0)
            .map(of)
            .filter(|c| c.bytes != 0)
            .collect()
    })
}

/// The parts that the kernel has switched on (XCR0).
///
/// # Safety
/// The processor has XSAVE, and the kernel has switched it on.
#[target_feature(enable = "xsave")]
unsafe fn enabled() -> u64 {
    // SAFETY: the caller's promise.
    unsafe { _xgetbv(0) }
}

/// Where the calling thread's control block is: on x86-64 its first word says so (ELF Handling For Thread-Local Storage,
/// 3.4.6).
#[inline]
pub fn thread_block() -> u64 {
    let block: u64;
    // SAFETY: reads a word that every thread has.
    unsafe { core::arch::asm!("mov {}, fs:0", out(reg) block, options(nostack, readonly, preserves_flags)) };
    block
}

/// The time stamp counter.
#[inline]
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 has it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_those_that_the_kernel_names() {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let flags = text.lines().find(|l| l.starts_with("flags")).unwrap();
        let flags: Vec<&str> = flags.split_whitespace().collect();
        for wanted in [
            "ssse3", "sse4_2", "avx", "avx2", "bmi2", "avx512f", "sha_ni", "xsavec", "rdtscp", "gfni",
        ] {
            assert_eq!(features().contains(&wanted), flags.contains(&wanted), "{wanted}");
        }
    }

    #[test]
    fn parts_lie_apart_and_behind_the_header() {
        let mut behind = 576;
        for c in components().iter().filter(|c| c.bytes != 0) {
            assert!(c.offset >= behind, "{c:?}");
            behind = c.offset + c.bytes;
        }
        assert_eq!(components().iter().any(|c| c.number == 2), features().contains(&"avx"));
    }
}
