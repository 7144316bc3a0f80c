//! The experiment of the VELOC paper: writers that have more to write than memory holds, a slow local tier and an
//! external one, each policy in turn, on tiers of known speeds ([`crate::buckets`]). No policy can be faster than
//!
//! ```text
//! local phase   (data - memory) / (external + slow)      what does not fit into memory must go to the slow tier, or leave memory through the external one
//! flush         data / external
//! ```

use crate::buckets::{models, run, Setting, CHUNK};
use crate::measure::Samples;
use crate::Plan;
use belay_storage::place::rule::Policy;

const WRITERS: u64 = 8;
/// Of all writers together.
const DATA: u64 = 256 << 20;
const MEMORY: u64 = DATA / 4;
/// Bytes per second of the slow tier.
const SLOW: f64 = (96 << 20) as f64;

/// All policies with the external tier at half, once and twice the speed of the slow one.
pub(crate) fn policies(p: &Plan) -> Result<(), String> {
    let dir = p.dir.join("policies");
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let setting = Setting {
        writers: WRITERS,
        chunks: DATA / CHUNK,
        memory: MEMORY,
        slow: SLOW,
        external: SLOW,
    };
    let models = models(&dir, setting)?;
    println!(
        "{WRITERS} writers, {} MiB, of which memory holds {}; slow tier {} MiB/s; one writer alone gets {:.0} of memory and {:.0} of the slow tier, eight {:.0} and {:.0} each",
        DATA >> 20,
        MEMORY >> 20,
        SLOW as u64 >> 20,
        models[0].per_writer(1) / 1048576.0,
        models[1].per_writer(1) / 1048576.0,
        models[0].per_writer(8) / 1048576.0,
        models[1].per_writer(8) / 1048576.0,
    );
    for factor in [0.5, 1.0, 2.0] {
        let external = SLOW * factor;
        let limit = ((DATA - MEMORY) as f64 / (external + SLOW), DATA as f64 / external);
        println!(
            "external {factor} x slow: no policy can need less than {:.3} s for the local phase and {:.3} s for the flush",
            limit.0, limit.1
        );
        let mut local: [Samples; 4] = Default::default();
        let mut flush: [Samples; 4] = Default::default();
        for _ in 0..p.runs {
            for (i, policy) in Policy::ALL.into_iter().enumerate() {
                let o = run(&dir, policy, Setting { external, ..setting }, &models)?;
                local[i].push(o.local);
                flush[i].push(o.all);
                if policy == Policy::LocalOnly && o.slow != setting.chunks {
                    return Err(format!("local-only has written {} chunks to the slow tier", o.slow));
                }
            }
        }
        for (i, policy) in Policy::ALL.into_iter().enumerate() {
            local[i].print(&format!("{factor} x, {}: local phase", policy.name()), "s");
            flush[i].print(&format!("{factor} x, {}: flush complete", policy.name()), "s");
        }
        let others = |s: &[Samples; 4]| s[2].median().min(s[3].median());
        for (what, s, limit) in [("local phase", &local, limit.0), ("flush", &flush, limit.1)] {
            let adaptive = s[0].median();
            println!(
                "{factor} x, {what}: adaptive is {:.3} of the better of naive and local-only (goal <= 1.05), {:.3} of the limit (goal <= 1.15), naive is {:.3} of adaptive",
                adaptive / others(s),
                adaptive / limit,
                s[3].median() / adaptive
            );
        }
    }
    Ok(())
}
