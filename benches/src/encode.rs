//! The codes of level `redundant`, on one processor: bytes of data per second, as they are encoded for a group, block by block.

use crate::measure::Samples;
use crate::Plan;
use belay_redundancy::{checksum, code, Layout, Scheme, BLOCK};
use std::time::Instant;

/// Data of one run, beyond every cache.
const BYTES: usize = 256 << 20;
/// Scheme, members of the group, parity.
const GROUPS: [(Scheme, usize, usize); 5] = [
    (Scheme::Xor, 4, 1),
    (Scheme::Xor, 8, 1),
    (Scheme::ReedSolomon, 4, 2),
    (Scheme::ReedSolomon, 8, 2),
    (Scheme::ReedSolomon, 16, 4),
];

/// GB/s for each scheme, without and with the checksums of all blocks.
pub(crate) fn encode(plan: &Plan) -> Result<(), String> {
    let block = usize::try_from(BLOCK).map_err(|e| e.to_string())?;
    let mut state = 1u64;
    let data: Vec<u8> = (0..BYTES / 8)
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_le_bytes()
        })
        .collect();
    for (scheme, members, parity) in GROUPS {
        let layout = Layout::new(scheme, members, parity).map_err(|e| e.to_string())?;
        let (mut bare, mut summed) = (Samples::default(), Samples::default());
        for _ in 0..plan.runs {
            for (samples, with_sums) in [(&mut bare, false), (&mut summed, true)] {
                let begin = Instant::now();
                let (mut done, mut seen) = (0, 0);
                for stripe in data.chunks_exact(layout.data * block) {
                    let blocks: Vec<&[u8]> = stripe.chunks_exact(block).collect();
                    let code = code::encode(&blocks, parity).map_err(|e| e.to_string())?;
                    let all = blocks.iter().copied().chain(code.iter().map(Vec::as_slice));
                    seen ^= if with_sums {
                        all.fold(0, |n, b| n ^ checksum(b))
                    } else {
                        u64::from(code[0][0])
                    };
                    done += stripe.len();
                }
                std::hint::black_box(seen);
                samples.push(done as f64 / begin.elapsed().as_secs_f64() / 1e9);
            }
        }
        let name = format!("{} {} + {parity}", scheme.name(), layout.data);
        bare.print(&format!("{name}: encode (goal >= 1)"), "GB/s");
        summed.print(&format!("{name}: encode, checksums"), "GB/s");
    }
    Ok(())
}
