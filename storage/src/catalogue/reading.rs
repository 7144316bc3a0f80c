//! Reading what a tier holds. What of it cannot be used is set aside, by name: only what needs that is out of reach.

use super::{number_of, Catalogue, Listed, MAX_RECORD};
use crate::pack::{Index, PackRef};
use crate::tier::{read_whole, Tier};
use crate::StorageError;

/// Longest reason that is read.
const MAX_REASON: u64 = 4096;

impl Catalogue {
    /// Reads what `tier` holds; packs whose index `known` has are not read again, and those that are suspect there
    /// without a mark on the tier stay so.
    pub fn read(tier: &dyn Tier, known: &Catalogue) -> Result<Self, StorageError> {
        let mut out = Self {
            is_read: true,
            suspect: known.suspicions(),
            unmarked: known.unmarked.clone(),
            distrusted: known.distrusted.clone(),
            incomplete: known.incomplete.clone(),
            sealing: tier.seals_with(),
            ..Self::default()
        };
        out.read_marks(tier)?;
        out.read_packs(tier, known)?;
        out.read_records(tier)?;
        // Generations are named before packs.
        out.locked.sort();
        // Numbers could be used twice if a job is copied; the later one counts.
        out.generations
            .sort_by_key(|g| (g.manifest.generation, g.manifest.time_unix_s));
        Ok(out)
    }

    fn read_marks(&mut self, tier: &dyn Tier) -> Result<(), StorageError> {
        for o in tier.list("suspect")? {
            let why = match read_whole(tier, &o.key, MAX_REASON) {
                Ok(why) => String::from_utf8_lossy(&why).into_owned(),
                Err(StorageError::TierDamaged { reason, .. } | StorageError::Locked { reason, .. }) => reason,
                // That there is one says enough.
                Err(e) => match of_object(tier, &o.key, e)? {
                    Some(why) => format!("it is marked so, and why cannot be read: {why}"),
                    None => continue,
                },
            };
            let pack = o.key.replacen("suspect", "packs", 1);
            self.suspect.entry(pack).or_insert(why);
        }
        Ok(())
    }

    fn read_packs(&mut self, tier: &dyn Tier, known: &Catalogue) -> Result<(), StorageError> {
        for o in tier.list("packs")? {
            let pack = PackRef {
                key: o.key,
                bytes: o.bytes,
            };
            self.bytes += o.bytes;
            if let Some(why) = self.suspect.get(&pack.key) {
                self.faults.push((pack.key.clone(), why.clone()));
            }
            let index = match known.packs.get(&pack) {
                Some(index) => Ok(index.clone()),
                None => Index::read(tier, &pack.key, pack.bytes),
            };
            match index {
                Ok(index) => {
                    let seal = tier.key_of(&pack.key).or_else(|| known.keys.get(&pack.key).cloned());
                    self.is_sealed_with(&pack.key, seal);
                    self.packs.insert(pack, index);
                }
                Err(e) if e.is_damage() && self.suspect.contains_key(&pack.key) => {}
                Err(e) => self.set_aside(tier, &pack.key, e)?,
            }
        }
        Ok(())
    }

    fn read_records(&mut self, tier: &dyn Tier) -> Result<(), StorageError> {
        for o in tier.list("gen")? {
            self.bytes += o.bytes;
            // Whoever has put that there, it is no generation, whatever it says.
            if number_of(&o.key).is_none() {
                self.faults.push((o.key, "no record has such a name".into()));
                continue;
            }
            let bytes = read_whole(tier, &o.key, MAX_RECORD);
            self.is_sealed_with(&o.key, tier.key_of(&o.key));
            let bytes = match bytes {
                Ok(bytes) => bytes,
                Err(e) => {
                    self.set_aside(tier, &o.key, e)?;
                    continue;
                }
            };
            match Listed::decode(&o.key, &bytes) {
                Ok(listed) => self.generations.push(listed),
                Err(reason) => self.faults.push((o.key, reason)),
            }
        }
        Ok(())
    }

    /// Notes why object `key` cannot be used: only what needs it is out of reach. An error is one of the whole tier.
    pub fn set_aside(&mut self, tier: &dyn Tier, key: &str, e: StorageError) -> Result<(), StorageError> {
        let own = key.to_owned();
        match e {
            StorageError::TierDamaged { reason, .. } => self.faults.push((own, reason)),
            StorageError::Locked { reason, .. } => self.locked.push((own, reason)),
            StorageError::Tier { ref source, .. } if e.is_damage() => self.faults.push((own, source.to_string())),
            e => self.unread.extend(of_object(tier, key, e)?.map(|why| (own, why))),
        }
        Ok(())
    }
}

/// Why object `key` could not be read; none where somebody has removed it since it was listed. Where the tier does not
/// answer at all, or something else than the object is to blame, that is an error: nobody is to wait for each object.
fn of_object(tier: &dyn Tier, key: &str, e: StorageError) -> Result<Option<String>, StorageError> {
    let why = match &e {
        StorageError::Tier { source, .. } => source.to_string(),
        _ => return Err(e),
    };
    let (folder, _) = key.split_once('/').unwrap_or(("", key));
    let there = tier.list(folder).map_err(|_| e)?;
    Ok(there.iter().any(|o| o.key == key).then_some(why))
}
