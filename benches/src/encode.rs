//! The codes of level `redundant`, on one processor: bytes of data per second, as they are encoded for a group, block by block.

use crate::measure::Samples;
use crate::Plan;
use belay_redundancy::code::Encoder;
use belay_redundancy::{checksum, Layout, Scheme, BLOCK};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
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

/// What is done with each stripe.
#[derive(Clone, Copy)]
enum Way {
    /// The code alone.
    Bare,
    /// The same, and the checksums of all blocks.
    Summed,
    /// What a member of a group does, but for the network: data read from a file and checked, the parity encoded, and
    /// one block of it checked and written.
    Whole,
}

const WAYS: [(Way, &str); 3] = [
    (Way::Bare, "encode (goal >= 1)"),
    (Way::Summed, "encode, checksums"),
    (Way::Whole, "read, encode, checksums, write"),
];

/// The data, in memory and in a file, and where parity goes.
struct Source {
    data: Vec<u8>,
    file: File,
    blocks: Vec<Vec<u8>>,
    parity: File,
}

impl Source {
    fn new(dir: &Path) -> Result<Self, String> {
        let mut state = 1u64;
        let data: Vec<u8> = (0..BYTES / 8)
            .flat_map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.to_le_bytes()
            })
            .collect();
        let open = |name: &str| {
            let path = dir.join(name);
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
            file.map_err(|e| format!("{}: {e}", path.display()))
        };
        let (mut file, parity) = (open("data")?, open("parity")?);
        file.write_all(&data).map_err(|e| format!("write the data: {e}"))?;
        Ok(Self {
            data,
            file,
            blocks: Vec::new(),
            parity,
        })
    }

    /// Encodes everything; GB/s of data.
    fn run(&mut self, way: Way, layout: Layout) -> Result<f64, String> {
        let block = usize::try_from(BLOCK).map_err(|e| e.to_string())?;
        let stripe_bytes = layout.data * block;
        self.blocks.resize(layout.data, vec![0; block]);
        let mut encoder = Encoder::new(layout.parity);
        let begin = Instant::now();
        let (mut done, mut seen) = (0, 0);
        for (n, stripe) in self.data.chunks_exact(stripe_bytes).enumerate() {
            let blocks: Vec<&[u8]> = stripe.chunks_exact(block).collect();
            let failed = |e: belay_redundancy::RedundancyError| e.to_string();
            seen ^= match way {
                Way::Bare => {
                    let parity = encoder.encode(&blocks).map_err(failed)?;
                    parity.block(0).map_or(0, |b| u64::from(b[0]))
                }
                Way::Summed => {
                    let parity = encoder.encode(&blocks).map_err(failed)?;
                    let all = blocks.iter().copied().chain(parity.blocks());
                    all.fold(0, |sum, b| sum ^ checksum(b))
                }
                Way::Whole => {
                    let mut sum = 0;
                    for (i, into) in self.blocks.iter_mut().enumerate() {
                        let at = n * stripe_bytes + i * block;
                        self.file
                            .read_exact_at(into, at as u64)
                            .map_err(|e| format!("read the data: {e}"))?;
                        sum ^= checksum(into);
                    }
                    let parity = encoder.encode(&self.blocks).map_err(failed)?;
                    let own = parity.block(0).ok_or("no parity")?;
                    self.parity
                        .write_all_at(own, (n * block) as u64)
                        .map_err(|e| format!("write parity: {e}"))?;
                    sum ^ checksum(own)
                }
            };
            done += stripe.len();
        }
        std::hint::black_box(seen);
        Ok(done as f64 / begin.elapsed().as_secs_f64() / 1e9)
    }
}

/// GB/s for each scheme and way, in turn.
pub(crate) fn encode(plan: &Plan) -> Result<(), String> {
    let mut source = Source::new(&plan.dir)?;
    for (scheme, members, parity) in GROUPS {
        let layout = Layout::new(scheme, members, parity).map_err(|e| e.to_string())?;
        let mut samples: [Samples; WAYS.len()] = Default::default();
        for _ in 0..plan.runs {
            for ((way, _), samples) in WAYS.iter().zip(&mut samples) {
                samples.push(source.run(*way, layout)?);
            }
        }
        for ((_, what), samples) in WAYS.iter().zip(&samples) {
            samples.print(&format!("{} {} + {parity}: {what}", scheme.name(), layout.data), "GB/s");
        }
    }
    Ok(())
}
