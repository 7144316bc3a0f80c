//! Completions that no device has given: after a restart, of requests and receives that the devices of before had.

use crate::shadow::{Completion, ShadowCq, ShadowQp};
use belay_ibv::*;

/// Says of each receive of a queue pair in error that it was flushed, which its device has not said any more.
pub(crate) unsafe fn flush_receives(q: &ShadowQp) {
    let log = q.recv.log.lock();
    for i in q.recv.places() {
        save(q.recv_cq(), completion(q, log.entry(i).wr_id, WC_RECV, WC_WR_FLUSH_ERR));
    }
    q.recv.clear();
}

fn completion(q: &ShadowQp, wr_id: u64, opcode: u32, status: u32) -> Wc {
    Wc {
        wr_id,
        status,
        opcode,
        qp_num: q.number(),
        ..Wc::default()
    }
}

/// Puts a completion behind those that the program has yet to get.
unsafe fn save(cq: *mut ShadowCq, wc: Wc) {
    let mut state = (*cq).state.lock();
    state.saved.push_back(Completion {
        wc,
        ..Completion::default()
    });
    (*cq).note_saved(&state);
}

/// Makes up a completion: of a request of which only the acknowledgement was missing, or which is lost.
pub(crate) unsafe fn complete(q: &ShadowQp, wr_id: u64, opcode: u32, status: u32) {
    let opcode = match opcode {
        WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM => WC_RDMA_WRITE,
        WR_RDMA_READ => WC_RDMA_READ,
        WR_ATOMIC_CMP_AND_SWP => WC_COMP_SWAP,
        WR_ATOMIC_FETCH_AND_ADD => WC_FETCH_ADD,
        _ => WC_SEND,
    };
    save(q.send_cq(), completion(q, wr_id, opcode, status));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::tests::end;

    #[test]
    fn receives_that_are_left_in_error_complete() {
        let e = end(QPT_RC, std::ptr::null_mut());
        let first = e.receive(&[4, 5, 6])[0];
        assert_eq!(e.polled(first, WC_WR_FLUSH_ERR, 0).map(|wc| wc.wr_id), Some(4));
        // SAFETY: it lives.
        unsafe { flush_receives(e.shadow()) };
        for id in [5, 6] {
            let wc = e.next().unwrap();
            assert_eq!((wc.wr_id, wc.status), (id, WC_WR_FLUSH_ERR));
        }
        assert!(e.next().is_none() && e.pending().1 == 0);
    }
}
