//! Remote shells: the root starts them for the stand-ins in the job, and lets these end as the shells have ended.

use super::Agent;
use crate::clients::ClientId;
use crate::nodes::path::STANDINS;
use crate::nodes::remote::{descriptors_of, end_standin, run_errand, shell_code, Life, Like, Remote, RemoteShell};
use crate::nodes::{again, Nodes};
use crate::{sys, Failure};
use belay_kernel::proc::born;
use belay_plugins::gate::gpu;
use belay_restart::{News, Shell};
use belay_wire::{Event, Exit};

/// Exit status of a remote shell whose host is lost.
const LOST: i32 = 255;

impl Agent {
    pub(super) fn outside(&self) -> Vec<i32> {
        let shells = self.nodes.as_ref().map(Nodes::outside).unwrap_or_default();
        shells.into_iter().chain(gpu::askers()).collect()
    }

    /// A stand-in for a remote shell asks for the shell.
    pub(super) fn start_remote(&mut self, id: ClientId, program: String, words: &[String]) {
        let standin = self.clients.pid(id);
        match self.try_start_remote(standin, &program, words) {
            Ok(()) => self.clients.send(id, &Event::Accepted),
            Err(f) => self.fail(id, f.exit, &f.to_string()),
        }
    }

    /// A stand-in asks for something to be run that is no part of the job. A checkpoint waits for its end, as the
    /// restarted stand-in could not.
    pub(super) fn ask_outside(&mut self, id: ClientId, (program, words): (String, Vec<String>), output: i32) {
        let standin = self.clients.pid(id);
        let standins = self.dir.path().join(STANDINS);
        let run = || {
            let fail = |e| Failure::system("take the stand-in's descriptors", &e);
            let [output, error] = descriptors_of(standin, [output, 2]).map_err(fail)?;
            let like = Like {
                pid: standin,
                standins: &standins,
            };
            run_errand((&program, &words), like, (output, error))
        };
        let Some(nodes) = self.nodes.as_mut().filter(|n| !n.is_part()) else {
            return self.fail(
                id,
                Exit::Protocol,
                "run something for a stand-in: this is no root of a job with parts on other hosts",
            );
        };
        match run() {
            Ok(child) => {
                tracing::info!(program, standin, pid = child.id(), "run for a stand-in");
                self.news.push(News::Shell(Shell {
                    pid: child.id().cast_signed(),
                    standin,
                }));
                let tag = nodes.next_tag();
                let remote = Remote {
                    words: RemoteShell::errand(&program),
                    standin,
                    born: born(standin),
                    first: tag,
                    child: Some(child),
                    life: Life::Errand,
                    code: 0,
                };
                nodes.remotes.insert(tag, remote);
                self.clients.send(id, &Event::Accepted);
            }
            Err(f) => self.fail(id, f.exit, &f.to_string()),
        }
    }

    /// Ends what is run for stand-ins that are not there any more, which nothing else would.
    pub(super) fn end_errands(&mut self) {
        let remotes = self.nodes.iter_mut().flat_map(|n| n.remotes.values_mut());
        for errand in remotes.filter(|r| r.is_in_vain()) {
            tracing::info!(program = errand.words.program, "nobody waits for it any more");
            errand.life = Life::Over;
            if let Some(pid) = errand.shell() {
                // It has a process group of its own.
                sys::kill(-pid, libc::SIGKILL);
            }
        }
    }

    fn try_start_remote(&mut self, standin: i32, program: &str, words: &[String]) -> Result<(), Failure> {
        let refused = |why: &str| Failure::new(Exit::Protocol, format!("start a remote shell: {why}"));
        let nodes = self.nodes.as_mut().filter(|n| !n.is_part());
        let nodes = nodes.ok_or_else(|| refused("the job was not launched with --across-hosts, or this is a part"))?;
        let words = RemoteShell::parse(program, words).ok_or_else(|| refused("no command for the other host"))?;
        let stdio = descriptors_of(standin, [0, 1, 2]).map_err(|e| Failure::system("take the stand-in's descriptors", &e))?;
        let first = nodes.next_tag();
        let tags: Vec<u64> = (first..first + words.parts()).collect();
        nodes.listen_for_parts()?;
        let command = again::agent_command(self.dir.path(), nodes, &tags, &words, &words.program_words())?;
        let standins = self.dir.path().join(STANDINS);
        let like = Like {
            pid: standin,
            standins: &standins,
        };
        let mut child = Some(words.spawn(&command, (Some(stdio), Some(like)))?);
        // Its number was perhaps another's.
        nodes.starters.retain(|s| s.standin != standin);
        self.news.extend(child.as_ref().map(|shell| {
            News::Shell(Shell {
                pid: shell.id().cast_signed(),
                standin,
            })
        }));
        tracing::info!(
            first,
            parts = tags.len(),
            host = words.host,
            shell = child.as_ref().map(std::process::Child::id),
            standin,
            "parts started"
        );
        for tag in tags {
            let remote = Remote {
                words: words.clone(),
                standin,
                born: born(standin),
                first,
                child: child.take(),
                life: Life::Starting,
                code: 0,
            };
            nodes.remotes.insert(tag, remote);
        }
        Ok(())
    }

    /// The stand-in was signalled: so is the shell.
    pub(super) fn signal_remote(&mut self, id: ClientId, signal: i32) {
        let standin = self.clients.pid(id);
        let remotes = self.nodes.iter().flat_map(|n| n.remotes.values());
        for shell in remotes.filter(|r| r.standin == standin).filter_map(Remote::shell) {
            sys::kill(shell, signal);
        }
        let starter = self.nodes.as_mut().and_then(|n| n.signal_starter(standin, signal));
        self.news.extend(starter.map(|shell| News::Signal(shell, signal)));
        self.clients.send(id, &Event::Accepted);
    }

    /// Child `pid` has ended; whether it was a remote shell.
    pub(super) fn remote_ended(&mut self, pid: i32, status: i32) -> bool {
        let mut remotes = self.nodes.iter_mut().flat_map(|n| n.remotes.values_mut());
        let Some(remote) = remotes.find(|r| r.shell() == Some(pid)) else {
            return false;
        };
        let code = shell_code(status);
        tracing::info!(host = remote.words.host, code, "remote shell ended");
        remote.child = None;
        if remote.has_standin() {
            end_standin(remote.standin, code);
        }
        let first = remote.first;
        let Some(nodes) = &mut self.nodes else { return true };
        // Of a part that has joined the tree tells whether it has ended or is lost; it may also go on without its shell.
        let there = &nodes.there;
        let is_there = |r: &Remote| r.node().is_some_and(|n| there.contains_key(&n));
        let its = nodes
            .remotes
            .values_mut()
            .filter(|r| r.first == first && r.life != Life::Lost);
        its.filter(|r| !is_there(r)).for_each(|r| r.life = Life::Over);
        true
    }

    /// What the loss of a node, or its end with exit status `code`, means for the remote shell that has started it.
    pub(super) fn look_after_remote(&mut self, node: u64, code: Option<i32>) {
        self.cancel_round();
        let mut remotes = self.nodes.iter_mut().flat_map(|n| n.remotes.values_mut());
        let Some(remote) = remotes.find(|r| r.life == Life::Joined(node)) else {
            return;
        };
        (remote.life, remote.code) = code.map_or((Life::Lost, LOST), |code| (Life::Over, code));
        let (first, standin) = (remote.first, remote.has_standin().then_some(remote.standin));
        let remotes = self.nodes.iter().flat_map(|n| n.remotes.values());
        let same: Vec<&Remote> = remotes.filter(|r| r.first == first).collect();
        // The shell tells better, where this agent has it.
        if same.iter().all(|r| r.child.is_none()) && (code.is_none() || same.iter().all(|r| r.is_over())) {
            // Of several tasks an srun tells the largest.
            let told = same.iter().map(|r| r.code).max().unwrap_or(LOST);
            match (standin, &mut self.nodes) {
                (Some(standin), Some(nodes)) if code.is_some() => nodes.part_with(standin, told),
                // A shell to a host that is lost may never end.
                (Some(standin), _) => end_standin(standin, told),
                (None, _) => {}
            }
        }
    }
}
