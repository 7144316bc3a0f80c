//! Send requests that a program makes step by step, between `ibv_wr_start` and `ibv_wr_complete`.
//!
//! They are made in the log, and posted from there. The send queue's lock is held in between.

use super::send::{give, have_handles};
use crate::gate::Inside;
use crate::shadow::{Building, Entry, Log, ShadowQp};
use belay_ibv::*;
use std::mem::ManuallyDrop;
use std::ptr::{addr_of, addr_of_mut};

unsafe fn building<'a>(qp: *mut QpEx) -> &'a mut Building {
    &mut *addr_of_mut!((*qp.cast::<ShadowQp>()).building)
}

unsafe fn shadow<'a>(qp: *mut QpEx) -> &'a ShadowQp {
    &*qp.cast::<ShadowQp>()
}

unsafe extern "C" fn wr_start(qp: *mut QpEx) {
    let inside = Inside::enter();
    shadow(qp).send.log.lock().keep();
    *building(qp) = Building {
        inside: Some(ManuallyDrop::new(inside)),
        ..Building::default()
    };
}

/// Begins a request, unless something has gone wrong since `ibv_wr_start`.
unsafe fn begin(qp: *mut QpEx, entry: Entry) {
    let (q, b) = (shadow(qp), building(qp));
    if b.error != 0 {
        return;
    }
    let mut log = q.send.log.held();
    let at = q.send.next() + b.count;
    if at >= q.send.limit() {
        b.error = libc::ENOMEM;
    } else {
        let flags = (*qp).wr_flags & !SEND_INLINE;
        *log.entry_mut(at) = Entry {
            wr_id: (*qp).wr_id,
            flags,
            ..entry
        };
        b.count += 1;
    }
    log.keep();
}

/// Changes the request that was begun last.
unsafe fn change(qp: *mut QpEx, with: impl FnOnce(&mut Log, u64) -> bool) {
    let (q, b) = (shadow(qp), building(qp));
    if b.error != 0 || b.count == 0 {
        return;
    }
    let mut log = q.send.log.held();
    if !with(&mut log, q.send.next() + b.count - 1) {
        b.error = libc::EINVAL;
    }
    log.keep();
}

unsafe extern "C" fn wr_complete(qp: *mut QpEx) -> Int {
    let (q, b) = (shadow(qp), building(qp));
    let first = q.send.next();
    let mut error = b.error;
    let log = q.send.log.held();
    // All are posted or none: what has been given to the provider cannot be taken back.
    if error == 0 && b.count > 1 && !have_handles(q, &log, first..first + b.count) {
        error = libc::EINVAL;
    }
    if error == 0 && b.count > 0 {
        q.send.publish(first + b.count);
        let (posted, refused) = give(q, &log, first, first + b.count);
        q.send.publish(first + posted);
        error = refused;
    }
    let inside = b.inside.take();
    drop(log);
    drop(inside.map(ManuallyDrop::into_inner));
    error
}

unsafe extern "C" fn wr_abort(qp: *mut QpEx) {
    let inside = building(qp).inside.take();
    drop(shadow(qp).send.log.held());
    drop(inside.map(ManuallyDrop::into_inner));
}

unsafe extern "C" fn wr_send(qp: *mut QpEx) {
    begin(
        qp,
        Entry {
            opcode: WR_SEND,
            ..Entry::default()
        },
    );
}

unsafe extern "C" fn wr_send_imm(qp: *mut QpEx, imm: u32) {
    begin(
        qp,
        Entry {
            opcode: WR_SEND_WITH_IMM,
            imm,
            ..Entry::default()
        },
    );
}

unsafe extern "C" fn wr_send_inv(qp: *mut QpEx, key: u32) {
    begin(
        qp,
        Entry {
            opcode: WR_SEND_WITH_INV,
            imm: key,
            ..Entry::default()
        },
    );
}

unsafe extern "C" fn wr_rdma_write(qp: *mut QpEx, key: u32, remote: u64) {
    begin(
        qp,
        Entry {
            opcode: WR_RDMA_WRITE,
            key,
            remote,
            ..Entry::default()
        },
    );
}

unsafe extern "C" fn wr_rdma_write_imm(qp: *mut QpEx, key: u32, remote: u64, imm: u32) {
    begin(
        qp,
        Entry {
            opcode: WR_RDMA_WRITE_WITH_IMM,
            key,
            remote,
            imm,
            ..Entry::default()
        },
    );
}

unsafe extern "C" fn wr_rdma_read(qp: *mut QpEx, key: u32, remote: u64) {
    begin(
        qp,
        Entry {
            opcode: WR_RDMA_READ,
            key,
            remote,
            ..Entry::default()
        },
    );
}

unsafe extern "C" fn wr_atomic_cmp_swp(qp: *mut QpEx, key: u32, remote: u64, compare: u64, swap: u64) {
    begin(
        qp,
        Entry {
            opcode: WR_ATOMIC_CMP_AND_SWP,
            key,
            remote,
            compare,
            swap,
            ..Entry::default()
        },
    );
}

unsafe extern "C" fn wr_atomic_fetch_add(qp: *mut QpEx, key: u32, remote: u64, add: u64) {
    begin(
        qp,
        Entry {
            opcode: WR_ATOMIC_FETCH_AND_ADD,
            key,
            remote,
            compare: add,
            ..Entry::default()
        },
    );
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut QpEx, ah: *mut Ah, number: u32, qkey: u32) {
    change(qp, |log, at| {
        let e = log.entry_mut(at);
        (e.remote, e.key, e.qkey) = (ah as u64, number, qkey);
        true
    });
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut QpEx, count: usize, list: *const Sge) {
    change(qp, |log, at| log.keep(at, list, count.min(i32::MAX as usize) as i32, 0));
}

unsafe extern "C" fn wr_set_sge(qp: *mut QpEx, lkey: u32, addr: u64, length: u32) {
    let one = Sge { addr, length, lkey };
    wr_set_sge_list(qp, 1, addr_of!(one));
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut QpEx, count: usize, list: *const DataBuf) {
    change(qp, |log, at| {
        log.entry_mut(at).flags |= SEND_INLINE;
        log.entry_mut(at).inline = 0;
        (0..count).all(|i| log.add_inline(at, (*list.add(i)).addr.cast(), (*list.add(i)).length))
    });
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut QpEx, addr: *mut Opaque, length: usize) {
    let one = DataBuf { addr, length };
    wr_set_inline_data_list(qp, 1, addr_of!(one));
}

/// The functions that a queue pair of this kind may be asked for.
pub(crate) fn send_operations(kind: u32) -> u64 {
    const DATAGRAMS: u64 = QP_EX_WITH_SEND | QP_EX_WITH_SEND_WITH_IMM;
    const CONNECTED: u64 = DATAGRAMS | QP_EX_WITH_RDMA_WRITE | QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    const ATOMIC: u64 = QP_EX_WITH_ATOMIC_CMP_AND_SWP | QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    match kind {
        QPT_RC => CONNECTED | QP_EX_WITH_SEND_WITH_INV | QP_EX_WITH_RDMA_READ | ATOMIC,
        QPT_UC => CONNECTED,
        _ => DATAGRAMS,
    }
}

/// Gives a queue pair the functions that were asked for, as far as its kind has them.
pub(crate) fn extend_qp(qp: &mut QpEx) {
    let connected = qp.base.qp_type != QPT_UD;
    let reliable = qp.base.qp_type == QPT_RC;
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    qp.wr_send = Some(wr_send);
    qp.wr_send_imm = Some(wr_send_imm);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    if !connected {
        qp.wr_set_ud_addr = Some(wr_set_ud_addr);
        return;
    }
    qp.wr_rdma_write = Some(wr_rdma_write);
    qp.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    if reliable {
        qp.wr_send_inv = Some(wr_send_inv);
        qp.wr_rdma_read = Some(wr_rdma_read);
        qp.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
        qp.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    }
}
