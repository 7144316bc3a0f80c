//! One stripe: parity from data, and lost data from what is left. One block of parity is the XOR of the data, more are
//! a Reed-Solomon code.

use crate::RedundancyError;
use reed_solomon_simd::{EncoderResult, ReedSolomonEncoder};

fn failed(e: reed_solomon_simd::Error) -> RedundancyError {
    RedundancyError::Code(e.to_string())
}

/// Adds `other` to `sum`.
fn xor(sum: &mut [u8], other: &[u8]) {
    for (a, b) in sum.iter_mut().zip(other) {
        *a ^= b;
    }
}

/// Encodes stripe after stripe in the same memory. With fresh memory for each, the allocator may give it back to the
/// kernel after each as well, and touching it anew takes several times as long as the code.
pub struct Encoder {
    parity: usize,
    /// The XOR of the data.
    sum: Vec<u8>,
    /// Made for the first stripe that needs it.
    code: Option<ReedSolomonEncoder>,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Encoder of {} blocks of parity", self.parity)
    }
}

/// The parity of one stripe.
pub struct Parity<'a>(Blocks<'a>);

enum Blocks<'a> {
    /// All are the same.
    Alike(&'a [u8], usize),
    Code(EncoderResult<'a>),
}

impl std::fmt::Debug for Parity<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.blocks()).finish()
    }
}

impl Parity<'_> {
    /// Block `slot`, if there is one.
    pub fn block(&self, slot: usize) -> Option<&[u8]> {
        match &self.0 {
            Blocks::Alike(block, parity) => (slot < *parity).then_some(block),
            Blocks::Code(result) => result.recovery(slot),
        }
    }

    /// All of them.
    pub fn blocks(&self) -> impl Iterator<Item = &[u8]> {
        (0..).map_while(|slot| self.block(slot))
    }
}

impl Encoder {
    /// An encoder that makes `parity` blocks for each stripe.
    pub fn new(parity: usize) -> Self {
        Self {
            parity,
            sum: Vec::new(),
            code: None,
        }
    }

    /// The parity of the data blocks `data`, which have one length, a multiple of [`crate::ALIGN`].
    pub fn encode<'a, T: AsRef<[u8]>>(&'a mut self, data: &'a [T]) -> Result<Parity<'a>, RedundancyError> {
        let alike = |block| Ok(Parity(Blocks::Alike(block, self.parity)));
        match data.split_first() {
            // With one block of data all parity is a copy.
            Some((only, [])) => alike(only.as_ref()),
            Some((first, others)) if self.parity == 1 => {
                self.sum.clear();
                self.sum.extend_from_slice(first.as_ref());
                for other in others {
                    xor(&mut self.sum, other.as_ref());
                }
                alike(&self.sum)
            }
            _ => {
                let bytes = data.first().map_or(0, |block| block.as_ref().len());
                let code = match &mut self.code {
                    Some(code) => {
                        code.reset(data.len(), self.parity, bytes).map_err(failed)?;
                        code
                    }
                    none => none.insert(ReedSolomonEncoder::new(data.len(), self.parity, bytes).map_err(failed)?),
                };
                for block in data {
                    code.add_original_shard(block).map_err(failed)?;
                }
                Ok(Parity(Blocks::Code(code.encode().map_err(failed)?)))
            }
        }
    }
}

/// The data blocks of a stripe of which any `blocks.len() - data` may be missing: data first, then parity.
pub fn reconstruct(blocks: &[Option<Vec<u8>>], data: usize) -> Result<Vec<Vec<u8>>, RedundancyError> {
    let left = blocks.iter().flatten().count();
    if left < data || data > blocks.len() {
        return Err(RedundancyError::Lost { left, needed: data });
    }
    let (known, parity) = blocks.split_at(data);
    if let Some(all) = known.iter().cloned().collect::<Option<Vec<_>>>() {
        return Ok(all);
    }
    if data == 1 {
        return Ok(blocks.iter().flatten().take(1).cloned().collect());
    }
    if let [Some(sum)] = parity {
        let mut lost = sum.clone();
        for other in known.iter().flatten() {
            xor(&mut lost, other);
        }
        return Ok(known.iter().map(|b| b.clone().unwrap_or_else(|| lost.clone())).collect());
    }
    let there = known.iter().enumerate().filter_map(|(n, b)| Some((n, b.as_ref()?)));
    let more = parity.iter().enumerate().filter_map(|(n, b)| Some((n, b.as_ref()?)));
    let mut restored = reed_solomon_simd::decode(data, parity.len(), there, more).map_err(failed)?;
    let whole = known
        .iter()
        .enumerate()
        .map(|(n, b)| b.clone().or_else(|| restored.remove(&n)));
    whole
        .collect::<Option<_>>()
        .ok_or(RedundancyError::Lost { left, needed: data })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blocks(encoder: &mut Encoder, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
        encoder.encode(data).unwrap().blocks().map(<[u8]>::to_vec).collect()
    }

    fn encode(data: &[Vec<u8>], parity: usize) -> Vec<Vec<u8>> {
        blocks(&mut Encoder::new(parity), data)
    }

    proptest! {
        #[test]
        fn an_encoder_keeps_nothing_of_the_stripes_before(
            parity in 1usize..5,
            stripes in prop::collection::vec((1usize..6, 1usize..5, any::<u8>()), 1..6),
        ) {
            let mut kept = Encoder::new(parity);
            for (data, units, seed) in stripes {
                let block = |n: usize| (0..units * 64).map(|i| seed.wrapping_mul(7).wrapping_add((i * (n + 3)) as u8)).collect();
                let data: Vec<Vec<u8>> = (0..data).map(block).collect();
                prop_assert_eq!(blocks(&mut kept, &data), encode(&data, parity));
            }
        }


        #[test]
        fn any_losses_up_to_the_parity_are_made_good(
            (data, parity) in (1usize..8, 1usize..5),
            units in 1usize..20,
            seed in any::<u64>(),
        ) {
            let mut state = seed | 1;
            let mut random = || { state ^= state << 13; state ^= state >> 7; state ^= state << 17; state };
            let original: Vec<Vec<u8>> = (0..data).map(|_| (0..units * 64).map(|_| random() as u8).collect()).collect();
            let code = encode(&original, parity);
            prop_assert_eq!(code.len(), parity);
            let mut blocks: Vec<Option<Vec<u8>>> = original.iter().chain(&code).cloned().map(Some).collect();
            for lost in 0..=parity {
                prop_assert_eq!(&reconstruct(&blocks, data).unwrap(), &original, "{} lost", lost);
                let left: Vec<usize> = (0..blocks.len()).filter(|n| blocks[*n].is_some()).collect();
                blocks[left[random() as usize % left.len()]] = None;
            }
            let too_many = RedundancyError::Lost { left: data - 1, needed: data };
            prop_assert_eq!(reconstruct(&blocks, data), Err(too_many));
        }
    }

    #[test]
    fn a_stripe_that_is_refused_leaves_nothing_behind() {
        let mut encoder = Encoder::new(2);
        let data = |odd: usize| -> Vec<Vec<u8>> { (0..3).map(|n| vec![n as u8 + 1; if n == odd { 128 } else { 64 }]).collect() };
        let good = data(usize::MAX);
        for odd in 0..3 {
            assert!(encoder.encode(&data(odd)).is_err());
            assert_eq!(blocks(&mut encoder, &good), encode(&good, 2));
        }
    }

    #[test]
    fn all_subsets_of_a_small_group() {
        let original: Vec<Vec<u8>> = (0..4u8)
            .map(|n| (0..128u8).map(|i| i.wrapping_mul(n + 3)).collect())
            .collect();
        for parity in 1..4 {
            let code = encode(&original, parity);
            let all: Vec<Vec<u8>> = original.iter().chain(&code).cloned().collect();
            for lost in 0u32..1 << all.len() {
                let blocks: Vec<_> = all
                    .iter()
                    .enumerate()
                    .map(|(n, b)| (lost >> n & 1 == 0).then(|| b.clone()))
                    .collect();
                let result = reconstruct(&blocks, 4);
                assert_eq!(
                    result.as_ref().ok(),
                    (lost.count_ones() as usize <= parity).then_some(&original)
                );
            }
        }
    }
}
