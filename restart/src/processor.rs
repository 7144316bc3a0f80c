//! Restart on another processor: what it must have, and its layout of the extended state. Pure.

use crate::memory::keys::Keys;
use belay_image::model::{Job, Processor, StateComponent};

/// Header of an XSAVE area: which parts are in use.
const IN_USE: usize = 512;
/// Behind the header lie the parts from number 2 on.
const PARTS: usize = 576;
/// Number of the rights for memory protection keys,
const KEYS: u32 = 9;
/// and what they are in a program that has no keys.
const NO_KEYS: [u8; 8] = [0x54, 0x55, 0x55, 0x55, 0, 0, 0, 0];

/// What `job` needs and `own` lacks, by name: instructions that its programs may have chosen, unless `any`, and
/// registers that its threads use. Empty where it can go on.
pub(crate) fn missing(job: &Job, own: &Processor, any: bool) -> Vec<String> {
    let Some(then) = &job.processor else { return Vec::new() };
    let lacks = |f: &&String| !any && !own.features.contains(f);
    let bytes = own
        .components
        .iter()
        .map(|c| (c.offset + c.bytes) as usize)
        .max()
        .unwrap_or(0);
    let mut out: Vec<String> = then.features.iter().filter(lacks).cloned().collect();
    let has_keys = own.components.iter().any(|c| c.number == KEYS);
    if !has_keys && job.processes.iter().any(|p| Keys::of(&p.vmas, p.keys).are_needed()) {
        out.push(Missing(KEYS).to_string());
    }
    for t in job.processes.iter().flat_map(|p| &p.threads) {
        if let Err(missing) = convert(&t.xstate, &then.components, &own.components, bytes) {
            out.push(missing.to_string());
        }
    }
    out.sort();
    out.dedup();
    out
}

/// A part of the extended state that is in use and that this processor lacks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Missing(u32);

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            2 => f.write_str("registers of AVX"),
            3 | 4 => f.write_str("registers of MPX"),
            5..=7 => f.write_str("registers of AVX-512"),
            KEYS => f.write_str("memory protection keys"),
            17 | 18 => f.write_str("registers of AMX"),
            other => write!(f, "registers (state component {other})"),
        }
    }
}

/// The extended state `saved`, laid out as `then`, in the layout of `now` with `bytes` bytes; what lies behind them has
/// no place there. Parts in their initial state need none.
pub(crate) fn convert(saved: &[u8], then: &[StateComponent], now: &[StateComponent], bytes: usize) -> Result<Vec<u8>, Missing> {
    let now: Vec<StateComponent> = now
        .iter()
        .filter(|c| (c.offset + c.bytes) as usize <= bytes)
        .copied()
        .collect();
    let head = &saved[..saved.len().min(PARTS)];
    let mut out = head.to_vec();
    out.resize(bytes.max(PARTS), 0);
    let saved_use = u64::from_le_bytes(*head.get(IN_USE..).and_then(|h| h.first_chunk()).unwrap_or(&[0; 8]));
    let mut used = saved_use;
    for number in (2..64).filter(|n| saved_use >> n & 1 != 0) {
        let part = |c: &&StateComponent| c.number == number;
        let from = then
            .iter()
            .find(part)
            .and_then(|c| saved.get(c.offset as usize..)?.get(..c.bytes as usize));
        let content = from.ok_or(Missing(number))?;
        match now.iter().find(part).filter(|c| c.bytes as usize == content.len()) {
            Some(c) => out[c.offset as usize..][..content.len()].copy_from_slice(content),
            None if content.iter().all(|b| *b == 0) || (number == KEYS && content == NO_KEYS) => used &= !(1 << number),
            None => return Err(Missing(number)),
        }
    }
    // Where it has come from there were no keys: they give no rights, as in every program that begins here.
    let keys = |list: &[StateComponent]| {
        list.iter()
            .find(|c| c.number == KEYS && c.bytes as usize == NO_KEYS.len())
            .copied()
    };
    if let (None, Some(c)) = (keys(then), keys(&now)) {
        out[c.offset as usize..][..NO_KEYS.len()].copy_from_slice(&NO_KEYS);
        used |= 1 << KEYS;
    }
    out[IN_USE..IN_USE + 8].copy_from_slice(&used.to_le_bytes());
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(number: u32, offset: u32, bytes: u32) -> StateComponent {
        StateComponent { number, offset, bytes }
    }

    /// An area of `length` bytes with `parts` in use, each filled with its number.
    fn area(length: usize, parts: &[StateComponent]) -> Vec<u8> {
        let mut out = vec![0; length];
        let used = parts.iter().fold(3u64, |a, c| a | 1 << c.number);
        out[..IN_USE].fill(0xee);
        out[IN_USE..IN_USE + 8].copy_from_slice(&used.to_le_bytes());
        for c in parts {
            out[c.offset as usize..][..c.bytes as usize].fill(c.number as u8);
        }
        out
    }

    #[test]
    fn parts_go_where_this_processor_has_them() {
        let then = [part(2, 576, 256), part(5, 832, 64), part(6, 896, 512), part(7, 1408, 1024)];
        let now = [part(2, 576, 256), part(5, 1088, 64), part(6, 1152, 512), part(7, 1664, 1024)];
        assert_eq!(convert(&area(2432, &then), &then, &now, 2696).unwrap(), area(2696, &now));
        assert_eq!(convert(&area(2432, &then), &then, &then, 2432).unwrap(), area(2432, &then));
    }

    #[test]
    fn what_is_in_use_and_has_no_place_is_missing() {
        let then = [part(2, 576, 256), part(7, 1408, 1024)];
        let now = [part(2, 576, 256)];
        assert_eq!(convert(&area(2432, &then), &then, &now, 832), Err(Missing(7)));
        let mut zero = area(2432, &then);
        zero[1408..].fill(0);
        assert_eq!(convert(&zero, &then, &now, 832).unwrap(), area(832, &now));
        // Marked as used, and no place told for it.
        assert_eq!(convert(&area(2432, &then), &now, &now, 832), Err(Missing(7)));
        assert_eq!(convert(&area(2432, &then)[..1500], &then, &then, 2432), Err(Missing(7)));
    }

    #[test]
    fn protection_keys_may_be_missing_where_there_are_none() {
        let with = [part(2, 576, 256), part(KEYS, 2688, 8)];
        let without = [part(2, 576, 256)];
        let mut saved = area(2696, &with);
        assert_eq!(convert(&saved, &with, &without, 832), Err(Missing(KEYS)));
        saved[2688..].copy_from_slice(&NO_KEYS);
        let plain = convert(&saved, &with, &without, 832).unwrap();
        assert_eq!(plain, area(832, &without));
        assert_eq!(convert(&plain, &without, &with, 2696).unwrap(), saved);
    }
}
