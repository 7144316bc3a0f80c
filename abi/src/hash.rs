//! The hash of a page: XXH3-128 with the default secret and seed 0. Its low half is the page's XXH3-64.
//!
//! The library `xxhash-rust` chooses its instructions when it is compiled, and must run everywhere: its 128-bit vectors
//! take twice as long as the 256-bit ones here, which are chosen when the program runs. The arithmetic follows the
//! description of the algorithm (<https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>, XXH3, inputs longer
//! than 240 bytes) for inputs of one page.

use crate::PAGE;
use core::arch::x86_64::*;
use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::xxh3_128;

/// A page.
pub type Page = [u8; PAGE as usize];

const SECRET: [u8; 192] = const_custom_default_secret(0);
const STRIPE: usize = 64;
/// Stripes between two scrambles: each uses the secret from 8 bytes further on, as long as a stripe of it is left.
const BLOCK: usize = (SECRET.len() - STRIPE) / 8;

const PRIME32: [u64; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
const PRIME64: [u64; 5] = [
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
];

/// How this processor hashes a page.
#[derive(Debug, Clone, Copy)]
pub struct PageHash {
    wide: bool,
}

impl PageHash {
    /// Looks at the processor, which may take microseconds in a virtual machine.
    pub fn detect() -> Self {
        const OSXSAVE: u32 = 1 << 27;
        const AVX: u32 = 1 << 28;
        const AVX2: u32 = 1 << 5;
        // Bits of SSE and AVX state: the kernel keeps both.
        const STATE: u64 = 6;
        let features = __cpuid(1).ecx;
        let has = features & (OSXSAVE | AVX) == OSXSAVE | AVX && __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ebx & AVX2 != 0;
        // SAFETY: a processor with OSXSAVE has the instruction.
        let wide = has && unsafe { _xgetbv(0) } & STATE == STATE;
        Self { wide }
    }

    /// Whether it uses the wide vectors, for a process on the same processor that cannot ask: a program can have
    /// switched the instruction off.
    pub fn is_wide(self) -> bool {
        self.wide
    }

    /// What another process has detected.
    ///
    /// # Safety
    /// `wide` is true only where [`PageHash::is_wide`] was, on this machine.
    pub unsafe fn detected(wide: bool) -> Self {
        Self { wide }
    }

    /// XXH3-128 of `page`.
    pub fn of(self, page: &Page) -> u128 {
        if self.wide {
            // SAFETY: `detect` has seen that the processor and the kernel have AVX2.
            unsafe { wide(page) }
        } else {
            xxh3_128(page)
        }
    }
}

/// Bytes `at..at + 32` of `bytes`.
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8], at: usize) -> __m256i {
    let part: &[u8; 32] = match bytes.get(at..).and_then(<[u8]>::first_chunk) {
        Some(part) => part,
        None => &[0; 32],
    };
    // SAFETY: 32 bytes, at any address.
    unsafe { _mm256_loadu_si256(part.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
fn accumulate(acc: &mut [__m256i; 2], page: &Page, at: usize, secret: usize) {
    for (i, acc) in acc.iter_mut().enumerate() {
        let data = load(page, at + 32 * i);
        let keyed = _mm256_xor_si256(data, load(&SECRET, secret + 32 * i));
        let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
        let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
        *acc = _mm256_add_epi64(product, _mm256_add_epi64(*acc, swapped));
    }
}

#[target_feature(enable = "avx2")]
fn scramble(acc: &mut [__m256i; 2]) {
    let prime = _mm256_set1_epi32(PRIME32[0] as i32);
    for (i, acc) in acc.iter_mut().enumerate() {
        let mixed = _mm256_xor_si256(*acc, _mm256_srli_epi64::<47>(*acc));
        let keyed = _mm256_xor_si256(mixed, load(&SECRET, SECRET.len() - STRIPE + 32 * i));
        let low = _mm256_mul_epu32(keyed, prime);
        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(keyed), prime);
        *acc = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
    }
}

#[target_feature(enable = "avx2")]
fn wide(page: &Page) -> u128 {
    let start = [
        [PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2]],
        [PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0]],
    ];
    // SAFETY: arrays of the same size, for all whose bits any value is valid.
    let mut acc: [__m256i; 2] = unsafe { core::mem::transmute(start) };
    let last = PAGE as usize - STRIPE;
    for block in (0..last).step_by(BLOCK * STRIPE) {
        for i in 0..BLOCK {
            // The last stripe of all has a part of the secret of its own.
            if block + i * STRIPE < last {
                accumulate(&mut acc, page, block + i * STRIPE, 8 * i);
            }
        }
        if block + BLOCK * STRIPE <= last {
            scramble(&mut acc);
        }
    }
    accumulate(&mut acc, page, last, SECRET.len() - STRIPE - 7);
    // SAFETY: as above.
    let acc: [u64; 8] = unsafe { core::mem::transmute(acc) };
    let low = merge(&acc, 11, PAGE.wrapping_mul(PRIME64[0]));
    let high = merge(&acc, SECRET.len() - STRIPE - 11, !PAGE.wrapping_mul(PRIME64[1]));
    u128::from(low) | u128::from(high) << 64
}

fn merge(acc: &[u64; 8], secret: usize, start: u64) -> u64 {
    let key = |i: usize| {
        let part = SECRET.get(secret + 8 * i..).and_then(<[u8]>::first_chunk);
        part.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    let fold = |i: usize| {
        let product = u128::from(acc[2 * i] ^ key(2 * i)) * u128::from(acc[2 * i + 1] ^ key(2 * i + 1));
        product as u64 ^ (product >> 64) as u64
    };
    let sum = (0..4).fold(start, |sum, i| sum.wrapping_add(fold(i)));
    let mixed = (sum ^ sum >> 37).wrapping_mul(0x1656_6791_9E37_79F9);
    mixed ^ mixed >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_agree_with_the_library_for_pages_of_all_kinds() {
        let detected = PageHash::detect();
        let mut state = 1u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state
        };
        let mut page = [0; PAGE as usize];
        for round in 0..20_000u64 {
            let expected = xxh3_128(&page);
            assert_eq!(detected.of(&page), expected, "round {round}");
            assert_eq!(PageHash { wide: false }.of(&page), expected);
            assert_eq!(expected as u64, xxhash_rust::xxh3::xxh3_64(&page));
            // Ever denser, and every place is reached: one byte, then words.
            let at = random() as usize % page.len();
            page[at] = (random() >> 56) as u8;
            if round > 10_000 {
                page.as_chunks_mut::<8>()
                    .0
                    .iter_mut()
                    .for_each(|w| *w = (u64::from_le_bytes(*w) ^ random()).to_le_bytes());
            }
        }
    }
}
