//! The agents of a job on test hosts, and how they are connected.

use crate::across::Job;
use crate::Failure;
use std::collections::BTreeSet;

/// The number of process `pid` on its host.
pub fn number_inside(pid: i32) -> Option<i64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|l| l.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().nth(1)?.parse().ok()
}

/// The host on which part `part` runs. What starts the parts may have done so in any order.
pub fn host_of(job: &Job, part: usize) -> Option<usize> {
    if part == 0 {
        return job.at.first().copied();
    }
    let is_belay = |p: &i32| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.trim() == "belay");
    let word = format!("nodes/{part} --key");
    job.at
        .iter()
        .copied()
        .find(|h| job.hosts.find(*h, &word).iter().any(is_belay))
}

/// The agent of part `part` as the test sees it.
pub fn agent(job: &Job, part: usize) -> Result<i32, Failure> {
    let host = host_of(job, part).ok_or(format!("part {part} is nowhere"))?;
    let said = job.on_host(host, &[&job.belay, "status", "--json", &job.dir_of(part)])?;
    let status: serde_json::Value = serde_json::from_str(&said).map_err(|e| format!("{e}: {said}"))?;
    let there = status["agent"]["host_pid"].as_i64().ok_or(format!("no agent: {said}"))?;
    let found = job
        .hosts
        .find(host, "belay")
        .into_iter()
        .find(|p| number_inside(*p) == Some(there));
    found.ok_or(format!("h{host} has no process {there}"))
}

/// TCP connections that process `pid` has. Those of an agent are to other agents.
pub fn connections(pid: i32) -> usize {
    sockets(pid, "01").len()
}

/// Where process `pid` listens, its addresses as the kernel's tables name them: an agent for other agents.
pub fn listening(pid: i32) -> BTreeSet<String> {
    sockets(pid, "0A").into_iter().collect()
}

/// The address of this host's end of each TCP socket of `pid` in `state`, in hexadecimal digits.
fn sockets(pid: i32, state: &str) -> Vec<String> {
    let held: BTreeSet<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| std::fs::read_link(e.path()).ok()?.to_str().map(str::to_owned))
        .collect();
    ["tcp", "tcp6"]
        .iter()
        .map(|table| std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default())
        .flat_map(|table| table.lines().skip(1).map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let inode = words.get(9)?;
            let is = words.get(3) == Some(&state) && held.contains(&format!("socket:[{inode}]"));
            let (address, _) = words.get(1)?.split_once(':')?;
            is.then(|| address.to_owned())
        })
        .collect()
}
