//! The hash of a page. The low half is its XXH3-64 with the default secret, the checksum that readers compare. The high
//! half is its XXH3-64 with a secret of the job: everybody can make pages that have the same checksum, and who could make
//! pages of the same hash would choose what a restart puts into the place of another page.
//!
//! The library `xxhash-rust` chooses its instructions when it is compiled, and must run everywhere: its 128-bit vectors
//! take twice as long as the 256-bit ones here, which are chosen when the program runs. The arithmetic follows the
//! description of the algorithm (<https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>, XXH3, inputs longer
//! than 240 bytes) for inputs of one page.

use crate::PAGE;
use core::arch::x86_64::*;
use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_secret};

/// A page.
pub type Page = [u8; PAGE as usize];
/// What hashes of pages are made with, besides the pages.
pub type Secret = [u8; SECRET_BYTES];

/// Bytes of a secret.
pub const SECRET_BYTES: usize = 192;
/// That of checksums.
const DEFAULT: Secret = const_custom_default_secret(0);
const STRIPE: usize = 64;
/// Stripes between two scrambles: each uses the secret from 8 bytes further on, as long as a stripe of it is left.
const BLOCK: usize = (SECRET_BYTES - STRIPE) / 8;

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

    /// The checksum of `page`.
    pub fn checksum(self, page: &Page) -> u64 {
        if self.wide {
            // SAFETY: `detect` has seen that the processor and the kernel have AVX2.
            let [sum] = unsafe { wide(page, [&DEFAULT]) };
            sum
        } else {
            xxh3_64(page)
        }
    }

    /// The hash of `page`.
    pub fn of(self, page: &Page, secret: &Secret) -> u128 {
        let [low, high] = if self.wide {
            // SAFETY: as above.
            unsafe { wide(page, [&DEFAULT, secret]) }
        } else {
            [xxh3_64(page), xxh3_64_with_secret(page, secret)]
        };
        u128::from(low) | u128::from(high) << 64
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

/// What is summed up with one secret.
type Sums = [__m256i; 2];

#[target_feature(enable = "avx2")]
fn accumulate<const N: usize>(sums: &mut [Sums; N], secrets: [&Secret; N], page: &Page, at: usize, from: usize) {
    for i in 0..2 {
        let data = load(page, at + 32 * i);
        let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data);
        for (sums, secret) in sums.iter_mut().zip(secrets) {
            let keyed = _mm256_xor_si256(data, load(secret, from + 32 * i));
            let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
            sums[i] = _mm256_add_epi64(product, _mm256_add_epi64(sums[i], swapped));
        }
    }
}

#[target_feature(enable = "avx2")]
fn scramble(sums: &mut Sums, secret: &Secret) {
    let prime = _mm256_set1_epi32(PRIME32[0] as i32);
    for (i, sum) in sums.iter_mut().enumerate() {
        let mixed = _mm256_xor_si256(*sum, _mm256_srli_epi64::<47>(*sum));
        let keyed = _mm256_xor_si256(mixed, load(secret, SECRET_BYTES - STRIPE + 32 * i));
        let low = _mm256_mul_epu32(keyed, prime);
        let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(keyed), prime);
        *sum = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
    }
}

/// XXH3-64 of `page` with each of the secrets.
#[target_feature(enable = "avx2")]
fn wide<const N: usize>(page: &Page, secrets: [&Secret; N]) -> [u64; N] {
    let start = [
        [PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2]],
        [PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0]],
    ];
    // SAFETY: arrays of the same size, for all whose bits any value is valid.
    let start: Sums = unsafe { core::mem::transmute(start) };
    let mut sums = [start; N];
    let last = PAGE as usize - STRIPE;
    for block in (0..last).step_by(BLOCK * STRIPE) {
        for i in 0..BLOCK {
            // The last stripe of all has a part of the secret of its own.
            if block + i * STRIPE < last {
                accumulate(&mut sums, secrets, page, block + i * STRIPE, 8 * i);
            }
        }
        if block + BLOCK * STRIPE <= last {
            for (sums, secret) in sums.iter_mut().zip(secrets) {
                scramble(sums, secret);
            }
        }
    }
    accumulate(&mut sums, secrets, page, last, SECRET_BYTES - STRIPE - 7);
    let mut out = [0; N];
    for ((out, sums), secret) in out.iter_mut().zip(sums).zip(secrets) {
        // SAFETY: as above.
        let words: [u64; 8] = unsafe { core::mem::transmute(sums) };
        *out = merge(&words, secret);
    }
    out
}

fn merge(words: &[u64; 8], secret: &Secret) -> u64 {
    let key = |i: usize| {
        let part = secret.get(11 + 8 * i..).and_then(<[u8]>::first_chunk);
        part.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    let fold = |i: usize| {
        let product = u128::from(words[2 * i] ^ key(2 * i)) * u128::from(words[2 * i + 1] ^ key(2 * i + 1));
        product as u64 ^ (product >> 64) as u64
    };
    let sum = (0..4).fold(PAGE.wrapping_mul(PRIME64[0]), |sum, i| sum.wrapping_add(fold(i)));
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
        let mut secret = [0; SECRET_BYTES];
        for round in 0..20_000u64 {
            secret[round as usize % SECRET_BYTES] = (random() >> 56) as u8;
            let sum = xxh3_64(&page);
            let expected = u128::from(sum) | u128::from(xxh3_64_with_secret(&page, &secret)) << 64;
            for hash in [detected, PageHash { wide: false }] {
                assert_eq!(hash.of(&page, &secret), expected, "round {round}");
                assert_eq!(hash.checksum(&page), sum);
            }
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
