//! Where the agents of a job listen for each other: at the addresses that `listen` in `[tree]` names, or at all of the
//! host while parts are being started, which come to the one that they reach; when all have come, only where they did.
//! Parts listen at the address from which they have reached the root.

use super::addresses::addresses;
use super::remote::Life;
use super::{failure, Nodes};
use crate::Failure;
use std::net::IpAddr;

impl Nodes {
    /// At the root, before parts are started: listens wherever they may come to.
    pub(crate) fn listen_for_parts(&mut self) -> Result<(), Failure> {
        if !self.listens_widely {
            self.listen_at(&addresses(&self.listen)?)?;
            self.listens_widely = true;
        }
        Ok(())
    }

    /// At the root: when all parts that were started have come, it listens no more where none of them came to.
    pub(crate) fn listen_to_parts(&mut self) {
        if !self.listens_widely || self.remotes.values().any(|r| r.life == Life::Starting) {
            return;
        }
        let reached = match (&self.joining, &self.tree) {
            (Some(joining), _) => joining.reached(),
            (None, Some(tree)) => tree.traffic().reached(),
            (None, None) => Vec::new(),
        };
        if reached.is_empty() {
            return;
        }
        match self.listen_at(&reached) {
            Ok(()) => self.listens_widely = false,
            Err(e) => tracing::warn!(error = %e, "the root listens at more addresses than parts come to"),
        }
    }

    fn listen_at(&mut self, addresses: &[IpAddr]) -> Result<(), Failure> {
        let done = match (&mut self.joining, &mut self.tree) {
            (Some(joining), _) => joining.listen_at(addresses),
            (None, Some(tree)) => tree.listen_at(addresses),
            (None, None) => Ok(()),
        };
        done.map_err(failure)
    }

    /// The addresses of this host at which this node listens, or may.
    pub(crate) fn at(&self) -> Result<Vec<IpAddr>, Failure> {
        let parsed = self
            .addresses()
            .into_iter()
            .filter_map(|a| Some(a.parse::<std::net::SocketAddr>().ok()?.ip()));
        let now: Vec<IpAddr> = parsed.collect();
        if now.is_empty() {
            return addresses(&self.listen);
        }
        Ok(now)
    }
}
