//! Which checkpoints stay: as many as were asked for, and no more than there is room for.

use super::Agent;
use crate::generations::{self, Generation};
use crate::redundancy::record;
use crate::{removal, tiers, Failure};
use belay_image::ImageError;
use belay_storage::engine::Engine;
use belay_storage::store;
use std::collections::BTreeSet;

impl Agent {
    /// Before a checkpoint: where a limit on storage would stand in its way, older generations go first, but never the
    /// newest whole one. What is redundant goes last, and not while a newer one is being made redundant.
    pub(super) fn make_room(&mut self) -> Result<(), Failure> {
        let Some(limit) = self.description.limit() else {
            return Ok(());
        };
        let gen = self.dir.generations();
        if generations::give_up_fetches(&gen)? {
            self.collect()?;
        }
        let newest = generations::manifests(&gen)?.last();
        let expected = newest.and_then(|(_, m)| m.ok()).map_or(0, |m| m.new_bytes);
        let room = limit.saturating_sub(expected);
        self.shrink_to(room, &self.being_encoded())?;
        // Else no newer one could be written, and so none be made redundant.
        if self.is_encoding() {
            Ok(())
        } else {
            self.shrink_to(room, &[])
        }
    }

    /// After a checkpoint, whether it succeeded or not: retention, and removal of chunks that are not needed any more.
    /// Not while one is being written.
    pub(super) fn tidy(&mut self) -> Result<(), Failure> {
        // Where several hosts have local tiers, it must be known first which generation depends on none of them.
        let is_alone = self.nodes.as_ref().is_none_or(|n| !n.is_part() && n.remotes.is_empty());
        if is_alone || !self.uses_local_tiers() || self.at_rest.is_some() {
            let pinned = [self.pinned(), self.being_encoded()].concat();
            let pinned: Vec<u64> = pinned.into_iter().chain(self.newest_at_rest()?).chain(self.at_rest).collect();
            generations::retain(&self.dir.generations(), self.description.keep, &pinned)?;
        }
        generations::give_up_fetches(&self.dir.generations())?;
        self.collect()?;
        self.tidy_redundancy()?;
        self.tidy_parts()?;
        match self.description.limit() {
            Some(limit) => self.shrink_to(limit, &self.being_encoded()),
            None => Ok(()),
        }
    }

    /// At the root: what parts have left that have ended.
    fn tidy_parts(&self) -> Result<(), Failure> {
        let Some(nodes) = self.nodes.as_ref().filter(|n| !n.is_part()) else {
            return Ok(());
        };
        let mut kept: BTreeSet<u64> = [self.pinned(), self.being_encoded()].concat().into_iter().collect();
        kept.extend(record::numbers(self.dir.path())?);
        // Without one of the root's nobody says what is old.
        let own = generations::numbers(&self.dir.generations())?;
        if own.is_empty() {
            return Ok(());
        }
        kept.extend(own);
        let live = nodes.rows().iter().map(|row| row.tag).collect();
        let gone = removal::of_ended(&self.dir, &live, &kept)?;
        if !gone.generations.is_empty() {
            tracing::info!(generations = ?gone.generations, chunks = gone.chunks.chunks, "removed of parts that have ended");
        }
        Ok(())
    }

    /// While newer generations lie in memory, in part: the newest that does not. It is what a power cut would leave.
    fn newest_at_rest(&self) -> Result<Option<u64>, Failure> {
        let Some(mover) = self.engine.mover() else { return Ok(None) };
        let all = generations::list(&self.dir.generations())?;
        let at_rest = generations::at_rest(&all, |ids| mover.in_memory(ids) > 0).next_back();
        Ok(at_rest.map(|g| g.number))
    }

    /// Generations of which nothing lies in tiers of this host.
    pub(super) fn at_rest_here(&self) -> Vec<u64> {
        let all = generations::list(&self.dir.generations()).unwrap_or_default();
        let is_away = |ids: &_| self.engine.mover().is_some_and(|m| !m.are_home(ids));
        generations::at_rest(&all, is_away).map(|g| g.number).collect()
    }

    /// Before the first checkpoint of this run: what may lie in tiers of hosts that the job has left is not waited for
    /// any longer. A part's generations without it are none. One that cannot be looked at for another reason stays.
    pub(super) fn forget_elsewhere(&self) -> Result<(), Failure> {
        if !store::forget_elsewhere(self.dir.path())? || self.seat.as_ref().is_none_or(|s| s.tag == 0) {
            return Ok(());
        }
        let gen = self.dir.generations();
        let all = generations::list(&gen)?;
        let mut lost = all.iter().filter(|g| g.manifest.as_ref().is_err_and(is_lost));
        lost.try_for_each(|g| generations::remove(&gen, g.number))
    }

    /// At the start: what nobody needs any more in the local tiers of this host goes.
    pub(super) fn clear_tiers(&self) {
        if let Some(seat) = &self.seat {
            tiers::local::clear(&self.dir, seat);
        }
    }

    /// At the start: chunks that earlier agents have left in local tiers go home.
    pub(super) fn move_what_is_left(&mut self) {
        let left = self.engine.mover().filter(|m| !m.desk().is_idle());
        if let Some(Err(e)) = left.map(|m| m.start()) {
            self.note_failure(&e.into(), false);
        }
    }

    /// Removes generations that are not `pinned` while what is here has more than `limit` bytes: the oldest first. The
    /// newest whole one stays, or that from which this run goes on: newer ones than that have been given up, and go last,
    /// as do those in which damage has been found.
    fn shrink_to(&mut self, limit: u64, pinned: &[u64]) -> Result<(), Failure> {
        let gen = self.dir.generations();
        let pinned: Vec<u64> = pinned.iter().copied().chain(self.since.from).collect();
        let is_over = |engine: &Engine| Ok::<_, Failure>(engine.bytes()? + generations::own_bytes(&gen)? > limit);
        if !is_over(&self.engine)? {
            return Ok(());
        }
        // What nobody needs goes first.
        self.collect()?;
        let whole = generations::list(&gen)?.iter().filter(|g| g.is_whole()).count();
        let mut keep = u32::try_from(whole).unwrap_or(u32::MAX);
        while keep > 1 && is_over(&self.engine)? {
            keep -= 1;
            // Also what is being flushed: a flush must not stand in the way of a checkpoint.
            let gone = generations::retain(&gen, keep, &pinned)?;
            if gone.is_empty() {
                continue;
            }
            tracing::info!(generations = ?gone, limit, "removed for want of room (--max-bytes)");
            self.collect()?;
        }
        let all = generations::list(&gen)?;
        let is_damaged = |g: &Generation| g.damage.is_some() && all.iter().any(Generation::is_whole);
        let is_given_up = |g: &&Generation| self.since.from.is_some_and(|from| g.number > from) || is_damaged(g);
        let given_up: Vec<u64> = all.iter().filter(is_given_up).map(|g| g.number).collect();
        for generation in given_up.into_iter().filter(|n| !pinned.contains(n)) {
            if !is_over(&self.engine)? {
                break;
            }
            generations::remove(&gen, generation)?;
            tracing::info!(
                generation,
                limit,
                "given up or damaged, removed for want of room (--max-bytes)"
            );
            self.collect()?;
        }
        Ok(())
    }

    /// After a checkpoint that has failed, or was given up: its chunks may have got their names already. Not while one
    /// is being written.
    pub(super) fn collect_failed(&mut self) {
        if let Err(failure) = self.collect() {
            self.note_failure(&failure, false);
        }
    }

    fn collect(&mut self) -> Result<(), Failure> {
        if let Some(needed) = generations::needed_chunks(&self.dir.generations())? {
            let removed = self.engine.collect(&needed)?;
            tracing::debug!(chunks = removed.chunks, bytes = removed.bytes, "chunks removed");
        }
        Ok(())
    }
}

/// Whether something is not there, or not as it was; else it could not be looked at.
fn is_lost(error: &ImageError) -> bool {
    match error {
        ImageError::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
        ImageError::Damaged { .. } => true,
        ImageError::Elsewhere { .. } | ImageError::Version { .. } | ImageError::Architecture { .. } => false,
    }
}
