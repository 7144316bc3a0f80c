//! One stripe: parity from data, and lost data from what is left. One block of parity is the XOR of the data, more are a Reed-Solomon code.

use crate::RedundancyError;

fn failed(e: reed_solomon_simd::Error) -> RedundancyError {
    RedundancyError::Code(e.to_string())
}

/// Adds `other` to `sum`.
fn xor(sum: &mut [u8], other: &[u8]) {
    for (a, b) in sum.iter_mut().zip(other) {
        *a ^= b;
    }
}

/// The `parity` blocks of the data blocks `data`, which have one length, a multiple of [`crate::ALIGN`].
pub fn encode<T: AsRef<[u8]>>(data: &[T], parity: usize) -> Result<Vec<Vec<u8>>, RedundancyError> {
    match data.split_first() {
        Some((first, others)) if parity == 1 => {
            let mut sum = first.as_ref().to_vec();
            for other in others {
                xor(&mut sum, other.as_ref());
            }
            Ok(vec![sum])
        }
        // With one block of data all parity is a copy.
        Some((only, [])) => Ok(vec![only.as_ref().to_vec(); parity]),
        _ => reed_solomon_simd::encode(data.len(), parity, data).map_err(failed),
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

    proptest! {
        #[test]
        fn any_losses_up_to_the_parity_are_made_good(
            (data, parity) in (1usize..8, 1usize..5),
            units in 1usize..20,
            seed in any::<u64>(),
        ) {
            let mut state = seed | 1;
            let mut random = || { state ^= state << 13; state ^= state >> 7; state ^= state << 17; state };
            let original: Vec<Vec<u8>> = (0..data).map(|_| (0..units * 64).map(|_| random() as u8).collect()).collect();
            let code = encode(&original, parity).unwrap();
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
    fn all_subsets_of_a_small_group() {
        let original: Vec<Vec<u8>> = (0..4u8)
            .map(|n| (0..128u8).map(|i| i.wrapping_mul(n + 3)).collect())
            .collect();
        for parity in 1..4 {
            let code = encode(&original, parity).unwrap();
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
