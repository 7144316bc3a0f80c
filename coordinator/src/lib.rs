//! The agent's event loop and the job: control socket, generations, commits, interval, status.
