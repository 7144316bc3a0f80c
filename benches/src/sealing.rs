//! Sealing of what goes to durable tiers, on one processor: bytes of contents per second, beside a copy of them and the
//! checksum that they get in any case.

use crate::measure::Samples;
use crate::Plan;
use belay_kernel::direct::Buffer;
use belay_redundancy::checksum;
use belay_storage::seal::{Keys, SEGMENT};
use belay_storage::tier::sealed::Sealed;
use belay_storage::tier::{Object, Put, Tier};
use belay_storage::StorageError;
use ring::aead::{Aad, Algorithm, LessSafeKey, Nonce, UnboundKey, AES_256_GCM, CHACHA20_POLY1305};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Contents of one run, beyond every cache, and of one piece of them.
const BYTES: usize = 256 << 20;
const PIECE: usize = 4 << 20;
const OBJECT: &str = "packs/000001-0123456789abcdef.bpk";

/// What is done with the contents.
#[derive(Clone, Copy)]
enum Way {
    Copy,
    Sum,
    /// A cipher alone, in place, segment by segment.
    Cipher(&'static Algorithm),
    /// What a flush does, to a tier in memory.
    Seal,
    /// What a fetch does, from there.
    Open,
}

const WAYS: [(Way, &str); 6] = [
    (Way::Copy, "copy (memcpy)"),
    (Way::Sum, "checksum (XXH3-64)"),
    (Way::Cipher(&AES_256_GCM), "AES-256-GCM alone"),
    (Way::Cipher(&CHACHA20_POLY1305), "ChaCha20-Poly1305 alone"),
    (Way::Seal, "sealed and copied"),
    (Way::Open, "copied and opened"),
];

/// A tier of one object, in memory.
#[derive(Debug, Clone, Default)]
struct Memory(Arc<Mutex<Vec<u8>>>);

impl Memory {
    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tier for Memory {
    fn name(&self) -> &str {
        "memory"
    }

    fn put<'a>(&'a self, _: &str) -> Result<Box<dyn Put + 'a>, StorageError> {
        self.bytes().clear();
        Ok(Box::new(self.clone()))
    }

    fn get(&self, _: &str, range: Range<u64>, buf: &mut Buffer) -> Result<(), StorageError> {
        buf.clear();
        buf.extend_from_slice(&self.bytes()[range.start as usize..range.end as usize]);
        Ok(())
    }

    fn length(&self, _: &str) -> Result<Option<u64>, StorageError> {
        Ok(Some(self.bytes().len() as u64))
    }

    fn list(&self, _: &str) -> Result<Vec<Object>, StorageError> {
        Ok(Vec::new())
    }

    fn delete(&self, _: &str) -> Result<(), StorageError> {
        Ok(())
    }

    fn sync(&self) -> Result<(), StorageError> {
        Ok(())
    }

    fn free(&self) -> Result<Option<u64>, StorageError> {
        Ok(None)
    }

    fn clear(&self) -> Result<u64, StorageError> {
        Ok(0)
    }
}

impl Put for Memory {
    fn write(&mut self, data: &[u8]) -> Result<(), StorageError> {
        self.bytes().extend_from_slice(data);
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<(), StorageError> {
        Ok(())
    }
}

/// The contents, where they go, and the tier.
struct Source {
    data: Vec<u8>,
    copy: Vec<u8>,
    tier: Sealed,
}

impl Source {
    fn new() -> Result<Self, String> {
        let data: Vec<u8> = (0..BYTES as u64 / 8)
            .flat_map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes())
            .collect();
        let memory = Memory::default();
        // Its pages are there before anything is measured.
        memory.bytes().resize(BYTES + BYTES / 512, 1);
        let keys = Keys::parse("5".repeat(64).as_bytes())?;
        Ok(Self {
            copy: data.clone(),
            data,
            tier: Sealed::new(Box::new(memory), Arc::new(keys), "job-0123456789abcdef"),
        })
    }

    fn seal(&self) -> Result<(), StorageError> {
        let mut put = self.tier.put(OBJECT)?;
        self.data.chunks(PIECE).try_for_each(|piece| put.write(piece))?;
        put.finish()
    }

    fn open(&self) -> Result<u64, StorageError> {
        let (mut buf, mut seen) = (Buffer::default(), 0);
        for at in (0..BYTES).step_by(PIECE) {
            self.tier.get(OBJECT, at as u64..(at + PIECE) as u64, &mut buf)?;
            seen ^= u64::from(buf[0]);
        }
        Ok(seen)
    }

    /// GB/s.
    fn run(&mut self, way: Way) -> Result<f64, String> {
        let begin = Instant::now();
        let seen = match way {
            Way::Copy => {
                self.copy.copy_from_slice(&self.data);
                u64::from(self.copy[BYTES / 2])
            }
            Way::Sum => self.data.chunks(PIECE).fold(0, |sum, piece| sum ^ checksum(piece)),
            Way::Cipher(algorithm) => encrypt(algorithm, &mut self.copy)?,
            Way::Seal => self.seal().map(|()| 0).map_err(|e| e.to_string())?,
            Way::Open => self.open().map_err(|e| e.to_string())?,
        };
        std::hint::black_box(seen);
        Ok(BYTES as f64 / begin.elapsed().as_secs_f64() / 1e9)
    }
}

fn encrypt(algorithm: &'static Algorithm, data: &mut [u8]) -> Result<u64, String> {
    let failed = |e: ring::error::Unspecified| e.to_string();
    let key = LessSafeKey::new(UnboundKey::new(algorithm, &[7; 32]).map_err(failed)?);
    let mut seen = 0;
    for (n, segment) in data.chunks_mut(SEGMENT as usize).enumerate() {
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&(n as u64).to_le_bytes());
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = key.seal_in_place_separate_tag(nonce, Aad::empty(), segment).map_err(failed)?;
        seen ^= u64::from(tag.as_ref()[0]);
    }
    Ok(seen)
}

/// GB/s of each way, in turn.
pub(crate) fn sealing(plan: &Plan) -> Result<(), String> {
    let mut source = Source::new()?;
    let mut samples: [Samples; WAYS.len()] = Default::default();
    source.run(Way::Seal)?;
    for _ in 0..plan.runs {
        for ((way, _), samples) in WAYS.iter().zip(&mut samples) {
            samples.push(source.run(*way)?);
        }
    }
    for ((_, what), samples) in WAYS.iter().zip(&samples) {
        samples.print(what, "GB/s");
    }
    Ok(())
}
