//! A part is lost, or programs whose state the GPU driver could not put back. Where the job is to be restarted without what
//! it has lost (`belay run --restarts`), the root ends what is left; its front then begins again from the newest
//! checkpoint, on the hosts that answer. Where only an agent is lost, its front ends what that leaves.
//!
//! ```text
//! Running ── a part is lost ────────────────────────────────────────> all is being ended ── no part is there, or LIMIT ── remote shells too ──> Ended
//!    └ the command fails ── parts are there of which nothing is heard ─┘ (within LIMIT, else the job has failed by itself)
//! ```

use super::asking::Told;
use super::{Agent, Setup};
use crate::nodes::{self, Nodes, Order};
use crate::redundancy::record;
use crate::{generations, sys};
use belay_plugins::gate::stranded::{self, Stranded};
use belay_tree::{Contribution, Values};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Under what parts tell of lost programs.
const LOST: &str = "lost";
/// How long parts may take to end, and their loss to be noticed when the command has failed because of it.
const LIMIT: Duration = Duration::from_secs(20);

/// What a job is restarted from when an agent of it is killed, where it is restarted at all: for the front.
#[derive(Debug, Clone)]
pub(crate) struct Fallback {
    restarts: bool,
    own: PathBuf,
    job: PathBuf,
}

impl Fallback {
    pub(crate) fn of(setup: &Setup) -> Self {
        let own = setup.dir.path();
        // On one host the program goes on without its agent.
        let has_others = setup.nodes.is_some() || setup.description.across_hosts;
        Self {
            restarts: setup.restarts && has_others,
            own: own.to_owned(),
            job: nodes::job_of(setup.nodes.as_ref(), own).to_owned(),
        }
    }

    /// Whether there is a checkpoint of the job, or may be in a moment: the root commits one when its parts have theirs.
    pub(crate) fn is_there(&self) -> bool {
        self.restarts && (has_checkpoint(&self.own) || has_checkpoint(&self.job))
    }
}

/// Whether there is a checkpoint in a job directory, or one that the hosts of a redundant job have.
fn has_checkpoint(dir: &Path) -> bool {
    generations::numbers(&dir.join("gen")).is_ok_and(|g| !g.is_empty()) || record::newest(dir).is_ok_and(|n| n.is_some())
}

/// What becomes of losses.
#[derive(Debug)]
pub(super) struct Losses {
    /// The front begins again.
    restarts: bool,
    /// The user has ended the job.
    given_up: bool,
    /// The job has begun to end because of one.
    since: Option<Instant>,
    /// Programs that GPU drivers have lost, each with its host and what is to be said of it.
    programs: Vec<(String, String)>,
    /// Processes of this host among those that were named.
    named: Vec<i32>,
    /// The command has failed.
    failed: Option<Instant>,
    /// At a part: it has lost its root, and another agent may have the job directory.
    pub(super) deposed: bool,
}

impl Losses {
    pub(super) fn new(restarts: bool) -> Self {
        Self {
            restarts,
            given_up: false,
            since: None,
            programs: Vec::new(),
            named: Vec::new(),
            failed: None,
            deposed: false,
        }
    }

    pub(super) fn restarts(&self) -> bool {
        self.restarts
    }

    /// Whether nothing is restarted when an agent is killed. A part ends without its root all the same.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up || !self.restarts
    }
}

impl Agent {
    fn parts_there(&self) -> bool {
        self.nodes.as_ref().is_some_and(|n| !n.there.is_empty())
    }

    /// The part on `host` is lost.
    pub(super) fn lose(&mut self, host: String) {
        let ends = self.ending.is_some() || self.root_status == Some(0);
        if !self.losses.restarts || (ends && self.losses.since.is_none()) {
            return;
        }
        self.description.lost.push((host, sys::now_unix_s()));
        if self.losses.since.is_some() {
            return;
        }
        if !has_checkpoint(self.dir.path()) {
            sys::say("there is no checkpoint from which the job could be restarted");
            self.description.lost.clear();
            self.losses.restarts = false;
            return;
        }
        sys::say("ending what is left of the job, to restart it from the newest checkpoint");
        tracing::info!("ending what is left, to restart it");
        self.losses.since = Some(Instant::now());
        self.order(&Order::End { grace_ms: 0 });
        self.force_end();
    }

    /// Looks, after a checkpoint, whether the driver has put back all programs that use a GPU. The root hears of those that
    /// are lost.
    pub(super) fn look_for_lost_programs(&mut self) {
        let lost = stranded::lost();
        let known = std::mem::replace(&mut self.losses.named, lost.iter().map(Stranded::pid).collect());
        if let Some(first) = lost.iter().find(|s| !known.contains(&s.pid())) {
            let why = not_put_back(first);
            tracing::error!(pids = ?self.losses.named, why, "programs are lost");
            if self.nodes.as_ref().is_some_and(Nodes::is_part) {
                return self.tell_root(&Told::Lost { why });
            }
            self.losses.programs.push((sys::host(), why));
        }
        self.end_without_programs();
    }

    /// At the root: a program on `host` is lost.
    pub(super) fn lose_program(&mut self, host: String, why: String) {
        self.losses.programs.push((host, why));
        self.end_without_programs();
    }

    /// Tells of programs that are lost, and ends the job where it is to be restarted without them, unless a checkpoint of all
    /// nodes has not come to its end yet: that may be the newest one.
    fn end_without_programs(&mut self) {
        if self.is_together() || self.writing.is_some() {
            return;
        }
        for (host, why) in std::mem::take(&mut self.losses.programs) {
            let at = if self.nodes.is_some() {
                format!("on {host}: ")
            } else {
                String::new()
            };
            let next = match self.losses.restarts && self.ending.is_none() {
                true => "",
                false => "; belay restart goes on from the newest checkpoint",
            };
            sys::say(&format!("{at}{why}{next}"));
            self.lose(host);
        }
    }

    /// The user ends the job: whatever is lost from now on, it is not restarted.
    pub(super) fn end_without_restart(&mut self) {
        if !self.nodes.as_ref().is_some_and(Nodes::is_part) {
            self.losses.restarts = false;
            self.description.lost.clear();
        }
    }

    /// The front is gone, which would have begun again: what is lost from now on leaves the rest as it is.
    pub(super) fn lose_front(&mut self) {
        let is_part = self.nodes.as_ref().is_some_and(Nodes::is_part);
        if !is_part && self.losses.restarts && self.losses.since.is_none() {
            tracing::warn!("the front is gone: nothing is restarted any more");
            self.end_without_restart();
        }
    }

    /// At a part: the root has heard that.
    pub(super) fn is_not_restarted(&mut self) {
        tracing::info!("told that nothing is restarted");
        self.losses.given_up = true;
    }

    /// At a part: the root is lost. Where that restarts the job without this part, what is left here must not go on beside it.
    pub(super) fn lose_root(&mut self, why: &str) {
        tracing::error!(why, "the root is lost");
        if self.losses.restarts {
            self.losses.deposed = true;
            sys::say(&format!(
                "{why}; the program is ended here, because the job may be restarted elsewhere"
            ));
            self.force_end();
        } else {
            sys::say(&format!("{why}; the program goes on, but no more checkpoints are taken"));
        }
    }

    /// The command has ended with this status word.
    pub(super) fn note_end(&mut self, status: i32) {
        if status != 0 {
            self.losses.failed = Some(Instant::now());
            self.set_tick();
        }
    }

    /// The command has failed, and it is not known yet whether that is because a part was lost.
    pub(super) fn may_have_lost(&self) -> bool {
        let waiting = self.losses.restarts && self.losses.since.is_none() && self.ending.is_none();
        waiting && self.losses.failed.is_some_and(|t| t.elapsed() < LIMIT) && self.parts_there()
    }

    /// Whether parts have had their time to end after a loss.
    pub(super) fn is_late(&self) -> bool {
        self.losses.since.is_some_and(|since| since.elapsed() >= LIMIT)
    }

    /// While the job ends because of a loss: remote shells that lead to no part any more, or to one that does not end, go too.
    pub(super) fn end_shells(&mut self) {
        if self.losses.since.is_none() || (self.parts_there() && !self.is_late()) {
            return;
        }
        for shell in self.nodes.as_ref().map(Nodes::outside).unwrap_or_default() {
            sys::kill(shell, libc::SIGKILL);
        }
    }
}

/// What is said of a program that is lost: the driver names those concerned, and why.
fn not_put_back(lost: &Stranded) -> String {
    format!("the GPU driver has not put back what it has taken off a GPU: {}", lost.why)
}

/// At a part, when it has written: adds to what it brings that programs are lost here.
pub(super) fn tell_lost(own: &mut Contribution, tag: u64) {
    if let Some(first) = stranded::lost().first() {
        own.publish.insert(
            format!("{LOST}/{tag}"),
            format!("on {}: {}", sys::host(), not_put_back(first)),
        );
    }
}

/// At the root: the wish for that,
pub(super) fn wish_lost() -> String {
    format!("{LOST}/*")
}

/// and what the user is to know of what was `said`.
pub(super) fn lost_elsewhere(said: &Values) -> impl Iterator<Item = String> + '_ {
    let of_parts = said
        .iter()
        .filter(|(name, _)| name.strip_prefix(LOST).is_some_and(|rest| rest.starts_with('/')));
    of_parts.map(|(_, why)| format!("{why}; restart the job from this generation (belay restart; belay run does so by itself)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_ends_with_its_agent_where_the_job_or_itself_has_a_checkpoint() {
        let job = std::env::temp_dir().join(format!("belay-losing-{}", std::process::id()));
        let own = job.join("nodes/1");
        let fallback = |restarts| Fallback {
            restarts,
            own: own.clone(),
            job: job.clone(),
        };
        assert!(!fallback(true).is_there());
        for dir in [&own, &job] {
            let generation = dir.join("gen").join(generations::name(1));
            std::fs::create_dir_all(&generation).unwrap();
            assert!(fallback(true).is_there() && !fallback(false).is_there());
            std::fs::remove_dir(&generation).unwrap();
            assert!(!fallback(true).is_there());
        }
        std::fs::remove_dir_all(job).unwrap();
    }
}
