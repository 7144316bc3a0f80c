//! What clients ask for.

use super::Agent;
use crate::clients::ClientId;
use crate::nodes::{Nodes, Order};
use belay_wire::{Event, Exit, Level, Request};
use std::time::{Duration, Instant};

impl Agent {
    pub(super) fn handle(&mut self, id: ClientId, request: Request) {
        tracing::debug!(?request, "request");
        match request {
            Request::Status => {
                self.hear_of_rot();
                self.tell_status(id);
            }
            Request::Checkpoint { then_stop, level } => {
                if self.nodes.as_ref().is_some_and(Nodes::is_part) {
                    return self.fail(
                        id,
                        Exit::Refused,
                        "this is a part of a job on several hosts; ask for a checkpoint of the whole job",
                    );
                }
                if self.ending.is_some() {
                    return self.fail(id, Exit::ProgramEnded, "the job is being ended");
                }
                if let Err(failure) = self.check_level(level, then_stop) {
                    return self.fail(id, failure.exit, &failure.to_string());
                }
                if level == Level::Durable {
                    self.flush.wants.insert(id);
                }
                if level == Level::Redundant {
                    self.encoding.wants.insert(id);
                }
                let wanted = self.queued.get_or_insert_default();
                wanted.by.push((id, Instant::now()));
                wanted.then_stop |= then_stop;
                self.begin_queued();
            }
            Request::Flush => self.flush_on_request(id),
            Request::RemoteStart { program, words } => self.start_remote(id, program, &words),
            Request::RemoteAsk { program, words, output } => self.ask_outside(id, (program, words), output),
            Request::RemoteSignal { signal } => self.signal_remote(id, signal),
            Request::Stop { grace_ms } => {
                self.end_without_restart();
                self.order(&Order::End { grace_ms });
                self.farewells.push((id, Event::Stopped { wait_status: None }));
                self.stop_awaiting_flush();
                self.ask_end(Duration::from_millis(grace_ms));
            }
        }
    }

    pub(super) fn fail(&mut self, id: ClientId, exit: Exit, message: &str) {
        let event = Event::Failed {
            exit,
            message: message.into(),
            passing: false,
        };
        self.clients.send(id, &event);
    }
}
