//! Room on a tier: what no generation needs goes first, then, where its capacity is limited, the oldest generations.

use super::{missing, task_bytes};
use crate::catalogue::Catalogue;
use crate::control::Control;
use crate::fetch::{check_pages, file_is_whole};
use crate::store::Store;
use crate::tier::Tier;
use crate::StorageError;
use belay_image::manifest::Manifest;
use belay_image::ImageError;
use std::path::Path;

/// Removes older generations while what the tier lacks of this one would not fit; the newest whole one stays.
pub(super) fn make(
    tier: &dyn Tier,
    capacity: u64,
    catalogue: &mut Catalogue,
    (generation, manifest, sum): (&Path, &Manifest, u64),
    control: &Control,
) -> Result<(), StorageError> {
    let mut whole = false;
    let mut is_whole = || {
        if !std::mem::replace(&mut whole, true) {
            check_here(generation, control)?;
        }
        Ok(())
    };
    loop {
        // What has been removed may have held chunks that this generation needs.
        let bytes: u64 = missing(manifest, sum, catalogue).iter().map(task_bytes).sum();
        if catalogue.bytes.saturating_add(bytes) <= capacity {
            return Ok(());
        }
        if !catalogue.give_way(tier, &mut is_whole)? {
            return Err(StorageError::TierFull {
                tier: tier.name().to_owned(),
                capacity,
                used: catalogue.bytes,
                bytes,
                advice: catalogue.advice(),
            });
        }
    }
}

/// Reads all of the generation in directory `generation`, and compares it with its checksums; `control` notes what is rotten.
pub fn check_here(generation: &Path, control: &Control) -> Result<(), StorageError> {
    compare(generation, control).inspect_err(|e| control.note(e))
}

fn compare(generation: &Path, control: &Control) -> Result<(), StorageError> {
    let manifest = Manifest::read(generation)?;
    let store = Store::of_generation(generation);
    for entry in &manifest.chunks {
        check_pages(&store.open(entry)?, control)?;
    }
    for f in manifest.files.iter().filter(|f| f.xxh3.is_some()) {
        let path = generation.join(&f.name);
        if !file_is_whole(&path, f) {
            return Err(ImageError::damaged(&path, "checksum does not match the manifest").into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flush::compress::Compression;
    use crate::flush::{flush, Options};
    use crate::testing::Scratch;
    use crate::tier::directory::Directory;
    use crate::tier::write_whole;

    fn options(capacity: u64) -> Options {
        Options {
            threads: 1,
            rate: None,
            zstd: Compression::Off,
            verify: true,
            keep: 9,
            capacity: Some(capacity),
        }
    }

    fn run(s: &Scratch, number: u64, tier: &Directory, capacity: u64) -> Result<Catalogue, StorageError> {
        let options = options(capacity);
        let mut catalogue = Catalogue::default();
        flush(
            &s.generation(number),
            tier,
            &options,
            &mut catalogue,
            &mut &[][..],
            &Control::default(),
        )?;
        Ok(catalogue)
    }

    /// Flips a bit in the middle of every pack of generation `number`, and has the tier looked at.
    fn damage(s: &Scratch, tier: &Directory, number: u64) {
        for o in tier
            .list("packs")
            .unwrap()
            .iter()
            .filter(|o| o.key.starts_with(&format!("packs/{number:06}")))
        {
            let path = s.0.join("pfs").join(&o.key);
            let mut bytes = std::fs::read(&path).unwrap();
            let at = bytes.len() / 2;
            bytes[at] ^= 1;
            std::fs::write(path, bytes).unwrap();
        }
        let mut catalogue = Catalogue::read(tier, &Catalogue::default()).unwrap();
        assert!(!catalogue.check(tier).unwrap().1.is_empty());
    }

    fn numbers(tier: &Directory) -> (Vec<u64>, usize) {
        let c = Catalogue::read(tier, &Catalogue::default()).unwrap();
        (c.whole().iter().map(|g| g.manifest.generation).collect(), c.doubtful().len())
    }

    #[test]
    fn where_a_record_is_damaged_nothing_goes_that_it_may_need_until_it_is_given_up() {
        let s = Scratch::new("unreadable");
        let tier = s.tier("pfs");
        let mut engine = s.engine();
        let capacity = 500_000;
        for n in 1..=3 {
            s.commit(&mut engine, n, &Scratch::memory(50, n));
        }
        for n in 1..=2 {
            run(&s, n, &tier, capacity).unwrap();
        }
        // That of the newest one.
        let record = tier.list("gen").unwrap().remove(1).key;
        write_whole(&tier, &record, b"no record").unwrap();
        let before = tier.list("").unwrap();
        let read = || Catalogue::read(&tier, &Catalogue::default()).unwrap();
        let attempt = |mut known: Catalogue| {
            let (three, options) = (s.generation(3), options(capacity));
            flush(&three, &tier, &options, &mut known, &mut &[][..], &Control::default())
        };
        let e = attempt(read()).unwrap_err();
        assert!(matches!(e, StorageError::TierFull { .. }), "{e}");
        for words in [&*record, "belay flush --check"] {
            assert!(e.to_string().contains(words), "{e}");
        }
        assert_eq!(tier.list("").unwrap(), before);
        // Not for one that is damaged itself.
        let chunk = Store::of_job(&s.job()).path(Manifest::read(&s.generation(3)).unwrap().chunks[0].id);
        let good = std::fs::read(&chunk).unwrap();
        let mut bad = good.clone();
        bad[5000] ^= 1;
        std::fs::write(&chunk, bad).unwrap();
        assert!(attempt(read().forgotten()).unwrap_err().is_damage());
        assert_eq!(tier.list("").unwrap(), before);
        std::fs::write(&chunk, good).unwrap();
        attempt(read().forgotten()).unwrap();
        assert_eq!(numbers(&tier), (vec![1, 3], 0));
    }

    #[test]
    fn where_all_are_damaged_they_make_room_only_for_one_that_is_whole() {
        let s = Scratch::new("doubtful");
        let tier = s.tier("pfs");
        let mut engine = s.engine();
        for n in 1..=4 {
            s.commit(&mut engine, n, &Scratch::memory(50, n));
        }
        // Room for two.
        let capacity = 500_000;
        for n in 1..=2 {
            run(&s, n, &tier, capacity).unwrap();
            damage(&s, &tier, n);
        }
        assert_eq!(numbers(&tier), (vec![], 2));
        let chunk_of = |n: u64| Store::of_job(&s.job()).path(Manifest::read(&s.generation(n)).unwrap().chunks[0].id);
        let refused = |n: u64, capacity| {
            let good = std::fs::read(chunk_of(n)).unwrap();
            let mut bad = good.clone();
            bad[5000] ^= 1;
            std::fs::write(chunk_of(n), bad).unwrap();
            let refused = run(&s, n, &tier, capacity).unwrap_err();
            assert!(refused.is_damage() && refused.to_string().contains("pages-"), "{refused}");
            std::fs::write(chunk_of(n), good).unwrap();
        };
        refused(3, capacity);
        assert_eq!(numbers(&tier), (vec![], 2), "they may be all there is");
        run(&s, 3, &tier, capacity).unwrap();
        assert_eq!(numbers(&tier), (vec![3], 1), "the oldest has gone");
        // Room for one; nothing on the tier is whole.
        damage(&s, &tier, 3);
        refused(4, 250_000);
        assert_eq!(numbers(&tier), (vec![], 2), "nothing has gone for it");
        run(&s, 4, &tier, 250_000).unwrap();
        assert_eq!(numbers(&tier), (vec![4], 0));
        assert_eq!(tier.list("suspect").unwrap(), []);
    }
}
