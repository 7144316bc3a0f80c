//! The key of a job: pages are found again by hashes that are made with it, so that nobody outside can make two pages
//! that count as one.

use crate::PAGES;
use belay_abi::hash::{Secret, SECRET_BYTES};
use ring::hkdf::{KeyType, Salt, HKDF_SHA256};
use rustix::rand::{getrandom, GetRandomFlags};
use serde::{Deserialize, Serialize};
use std::fmt;

const KEY_BYTES: usize = 32;

/// The key.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PageKey([u8; KEY_BYTES]);

impl PageKey {
    /// One that nobody has.
    pub fn random() -> Self {
        let mut key = [0; KEY_BYTES];
        // It cannot fail for so few bytes once the system has started.
        let _ = getrandom(&mut key[..], GetRandomFlags::empty());
        Self(key)
    }

    /// What hashes are made with.
    pub fn secret(&self) -> PageSecret {
        let mut secret = [0; SECRET_BYTES];
        let made = Salt::new(HKDF_SHA256, b"belay page hashes").extract(&self.0);
        // No more than 255 times what SHA-256 has are asked for, which is all that can fail.
        let filled = made.expand(&[], Length).and_then(|okm| okm.fill(&mut secret));
        debug_assert!(filled.is_ok());
        PageSecret(secret)
    }
}

/// How long a secret is, for the library.
struct Length;

impl KeyType for Length {
    fn len(&self) -> usize {
        SECRET_BYTES
    }
}

impl Default for PageKey {
    fn default() -> Self {
        Self::random()
    }
}

impl fmt::Debug for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageKey")
    }
}

impl From<PageKey> for String {
    fn from(key: PageKey) -> Self {
        hex::encode(key.0)
    }
}

impl TryFrom<String> for PageKey {
    type Error = hex::FromHexError;

    fn try_from(digits: String) -> Result<Self, Self::Error> {
        let mut key = [0; KEY_BYTES];
        hex::decode_to_slice(digits, &mut key)?;
        Ok(Self(key))
    }
}

/// What a job's hashes are made with.
#[derive(Clone)]
pub struct PageSecret(Secret);

impl PageSecret {
    /// The hash of a page.
    pub fn hash(&self, page: &belay_abi::hash::Page) -> u128 {
        PAGES.of(page, &self.0)
    }

    /// As words, for the writers of a copy.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word))
    }
}

impl fmt::Debug for PageSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageSecret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE;
    use std::collections::{BTreeSet, HashMap};
    use xxhash_rust::xxh3::xxh3_128;

    /// A page of which many have the same XXH3-128 with a secret that is known: where the lower half of a word is that of
    /// the secret, it is only added to the sum, and another word can make up for what it is.
    fn crafted(word: u32) -> [u8; PAGE as usize] {
        let mut page = [7; PAGE as usize];
        // The first words of the default secret, for the first two stripes.
        for (stripe, (low, high)) in [(0x396c_feb8u32, word), (0x2c81_017c, 0u32.wrapping_sub(word))]
            .into_iter()
            .enumerate()
        {
            page[64 * stripe..][..4].copy_from_slice(&low.to_le_bytes());
            page[64 * stripe + 4..][..4].copy_from_slice(&high.to_le_bytes());
        }
        page
    }

    #[test]
    fn pages_made_to_have_one_hash_have_not() {
        let [one, other] = [crafted(1000), crafted(4242)];
        assert_eq!(xxh3_128(&one), xxh3_128(&other));
        let secret = PageKey::random().secret();
        assert_ne!(secret.hash(&one), secret.hash(&other));
        assert_ne!(secret.hash(&one), PageKey::random().secret().hash(&one));
        assert_eq!(secret.hash(&one), secret.clone().hash(&one));
    }

    #[test]
    fn keys_come_back_from_text_and_are_not_shown() {
        let key = PageKey::random();
        let text = serde_json::to_string(&key).unwrap();
        assert_eq!(serde_json::from_str::<PageKey>(&text).unwrap(), key);
        for bad in ["\"\"", "\"00\"", "\"zz\"", "7"] {
            assert!(serde_json::from_str::<PageKey>(bad).is_err(), "{bad}");
        }
        assert_eq!(format!("{key:?} {:?}", key.secret()), "PageKey PageSecret");
        assert_ne!(PageKey::random(), key);
    }

    #[test]
    fn the_low_half_of_the_hash_is_the_checksum() {
        let secret = PageKey::random().secret();
        for seed in 0..100usize {
            let page = std::array::from_fn(|i| (i.wrapping_mul(seed + 7) >> 3) as u8);
            assert_eq!(secret.hash(&page) as u64, belay_image::checksum(&page));
            assert_eq!(crate::page_checksum(&page), belay_image::checksum(&page));
        }
    }

    /// The experiment of L. Bautista-Gomez and F. Cappello for differential checkpoints, for the hash used here: blocks
    /// that differ in few bits, at random places, must not have the same hash.
    #[test]
    fn blocks_that_differ_in_few_bits_have_different_hashes() {
        let mut state = 1u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state >> 33
        };
        let mut page = [0; PAGE as usize].map(|_: u8| random() as u8);
        let secret = PageKey::random().secret();
        let bits = page.len() * 8;
        let mut flip = |set: &BTreeSet<usize>| {
            set.iter().for_each(|bit| page[bit / 8] ^= 1 << (bit % 8));
            let hash = secret.hash(&page);
            set.iter().for_each(|bit| page[bit / 8] ^= 1 << (bit % 8));
            hash
        };
        // Nothing, every single bit, and up to eight at random.
        let few = (0..20_000).map(|_| (0..=random() % 8).map(|_| random() as usize % bits).collect());
        let single = (0..bits).map(|bit| BTreeSet::from([bit]));
        let mut seen: HashMap<u128, BTreeSet<usize>> = HashMap::new();
        for set in [BTreeSet::new()].into_iter().chain(single).chain(few) {
            let hash = flip(&set);
            if let Some(other) = seen.insert(hash, set.clone()) {
                assert_eq!(set, other, "the same hash");
            }
        }
        assert!(seen.len() > bits + 15_000);
    }
}
