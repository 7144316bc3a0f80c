//! The call list, carried out on a model of an address space, must give the saved mappings whatever they are.

use super::*;
use belay_image::model::FileIdentity;
use std::collections::BTreeMap;

const AREA: Range = 0x5000_0000..0x5100_0000;
const SCRATCH: u64 = 0x5080_0000;

/// One page of the model: (protection, what is mapped, filled).
type Page = (u64, String, bool);

fn vma(start: u64, pages: u64, prot: u32, kind: VmaKind) -> Vma {
    Vma {
        start,
        end: start + pages * 4096,
        prot,
        kind,
        flags: Vec::new(),
        guards: Vec::new(),
        key: 0,
    }
}

fn anonymous() -> VmaKind {
    VmaKind::Anonymous { name: None }
}

fn file() -> VmaKind {
    VmaKind::FilePrivate {
        path: "/lib/x.so".into(),
        offset: 0x3000,
        identity: Some(FileIdentity {
            bytes: 1,
            mtime_ns: 0,
            build_id: None,
            xxh3: None,
        }),
    }
}

fn fill(vaddr: u64, pages: u64, offset: u64) -> Fill {
    Fill {
        vaddr,
        bytes: pages * 4096,
        offset,
        fd: 9,
        droppable: 0,
        sums: 0,
    }
}

fn make(vmas: &[Vma], fills: Vec<Fill>) -> Result<MemoryPlan, MemoryError> {
    make_with(vmas, fills, &[])
}

/// The same, where these mappings are filled later.
fn make_with(vmas: &[Vma], fills: Vec<Fill>, later: &[Range]) -> Result<MemoryPlan, MemoryError> {
    let input = Input {
        vmas,
        fills,
        area: AREA,
        others: Vec::new(),
        scratch: SCRATCH,
        specials: vec![Special {
            name: "vdso".into(),
            range: 0x7fff_1000_0000..0x7fff_1000_2000,
        }],
        foreign: None,
        keys: Keys::of(vmas, 0),
        pid: 1,
        later: (later, Some(8)),
        kept: &[],
        drops: &[],
        ask_huge: true,
        shared_fd: &|object, may_write| (object.ino == 7).then_some(if may_write { 1001 } else { 1000 }),
        segment_bytes: &|shmid| (shmid == 3).then_some(0x4000),
        copy: &|_, _| None,
    };
    plan(input, &mut Arena::new(AREA.start))
}

/// Carries out a list on a page table. Writing where it is not allowed, or mapping over the area, fails the test.
fn run(calls: &[Call], space: &mut BTreeMap<u64, Page>) {
    for c in calls {
        let [a, b, prot, flags, fd, _] = c.args;
        let pages = |start: u64, bytes: u64| (start..start + bytes.next_multiple_of(4096)).step_by(4096);
        match c.nr {
            nr::MMAP => {
                assert!(b < 1 << 40 || flags & MAP_NORESERVE != 0);
                assert!(a + b <= AREA.start || a >= AREA.end, "maps over the restorer");
                let what = match flags {
                    f if f & MAP_ANONYMOUS != 0 => "anon".to_owned(),
                    _ if c.flags & CALL_USE_KEPT_ARG4 != 0 => "file".to_owned(),
                    f => format!("fd{}{}", fd, if f & MAP_SHARED != 0 { "s" } else { "p" }),
                };
                if b < 1 << 30 {
                    pages(a, b).for_each(|p| drop(space.insert(p, (prot, what.clone(), false))));
                }
            }
            nr::MPROTECT => pages(a, b).for_each(|p| space.get_mut(&p).expect("protects what is mapped").0 = prot),
            nr::MUNMAP => space.retain(|p, _| *p < a || *p >= a.saturating_add(b)),
            nr::MREMAP => pages(c.args[4], prot).for_each(|p| drop(space.insert(p, (5, "vdso".into(), false)))),
            nr::SHMAT => pages(b, 0x4000).for_each(|p| drop(space.insert(p, (3, "sysv".into(), false)))),
            _ => {}
        }
    }
}

fn carry_out(p: &MemoryPlan) -> BTreeMap<u64, Page> {
    let mut space = BTreeMap::from([(0x40_0000, (5, "agent".to_owned(), false))]);
    run(&p.before, &mut space);
    for f in &p.fills {
        for at in (f.vaddr..f.vaddr + f.bytes).step_by(4096) {
            let page = space.get_mut(&at).expect("reads into what is mapped");
            assert_eq!(page.0 & PROT_WRITE, PROT_WRITE, "reads into writable memory");
            page.2 = true;
        }
    }
    run(&p.after, &mut space);
    space.retain(|at, _| !AREA.contains(at));
    space
}

#[test]
fn protected_mappings_with_pages_end_protected() {
    let vmas = [
        vma(0x1_0000, 4, 0, anonymous()),
        vma(0x2_0000, 4, 1, anonymous()),
        vma(0x3_0000, 2, 5, file()),
        vma(0x4_0000, 2, 5, file()),
        vma(0x5_0000, 2, 3, VmaKind::Heap),
        vma(0x6_0000, 2, 3, VmaKind::Stack),
        vma(0x7_0000, 2, 5, VmaKind::Vdso("vdso".into())),
        vma(0x7fff_ffff_0000, 1, 4, VmaKind::Vsyscall),
    ];
    let fills = vec![
        fill(0x1_1000, 1, 0),
        fill(0x2_0000, 4, 0x1000),
        fill(0x3_1000, 1, 0x5000),
        fill(0x6_1000, 1, 0x6000),
    ];
    for later in [vec![], vec![0x1_0000..0x1_4000, 0x5_0000..0x5_2000]] {
        let space = carry_out(&make_with(&vmas, fills.clone(), &later).unwrap());
        for v in vmas.iter().filter(|v| v.kind != VmaKind::Vsyscall) {
            for at in (v.start..v.end).step_by(4096) {
                assert_eq!(space[&at].0, u64::from(v.prot), "protection at {at:#x}");
            }
        }
        assert_eq!(space.len(), 18, "nothing else is left");
        assert!(space[&0x1_1000].2 && !space[&0x1_0000].2);
        assert_eq!(space[&0x4_0000].1, "file");
    }
}

#[test]
fn missing_pages_are_waited_for_as_soon_as_their_mapping_is_there() {
    let vmas = [vma(0x10_0000, 512, 1, anonymous()), vma(0x80_0000, 512, 3, VmaKind::Heap)];
    let p = make_with(
        &vmas,
        vec![fill(0x10_3000, 1, 0)],
        std::slice::from_ref(&(0x10_0000..0x30_0000)),
    )
    .unwrap();
    let maps = |c: &Call| c.nr == nr::MMAP && c.args[0] == 0x10_0000;
    let mapped = p.before.iter().position(maps).unwrap();
    let waits: Vec<usize> = (0..p.before.len()).filter(|i| p.before[*i].nr == nr::IOCTL).collect();
    assert!(waits.len() == 1 && waits[0] > mapped, "the second mapping is complete");
    assert_eq!(p.before[waits[0]].args[..2], [8, missing::REGISTER]);
    let space = carry_out(&p);
    assert_eq!(space[&0x10_0000].0, 1, "protected as it was");
    assert!(space[&0x10_3000].2, "what is read at once is");
}

#[test]
fn a_reservation_of_terabytes_is_one_call() {
    let mut big = vma(0x1000_0000_0000, (2 << 40) / 4096, 3, anonymous());
    big.flags.push("nr".into());
    let p = make(&[big], vec![fill(0x1000_0000_0000, 1, 0)]).unwrap();
    let maps: Vec<&Call> = p.before.iter().filter(|c| c.nr == nr::MMAP).collect();
    assert_eq!(maps.len(), 1);
    assert_eq!(maps[0].args[3] & MAP_NORESERVE, MAP_NORESERVE);
    assert!(
        p.before.iter().all(|c| c.nr != nr::MADVISE),
        "a sparse mapping gets no huge pages"
    );
}

#[test]
fn dense_mappings_are_filled_as_huge_pages() {
    let p = make(&[vma(0x1000_0000, 4096, 3, anonymous())], vec![fill(0x1000_0000, 4096, 0)]).unwrap();
    assert!(p.before.iter().any(|c| c.nr == nr::MADVISE && c.args[2] == MADV_HUGEPAGE));
    let mut no = vma(0x1000_0000, 4096, 3, anonymous());
    no.flags.push("nh".into());
    let p = make(&[no], vec![fill(0x1000_0000, 4096, 0)]).unwrap();
    let advice = p.before.iter().filter(|c| c.nr == nr::MADVISE).map(|c| c.args[2]);
    assert_eq!(advice.collect::<Vec<_>>(), [MADV_NOHUGEPAGE], "before it is read");
}

#[test]
fn system_v_attachments_are_made_once_and_trimmed() {
    let part = |start: u64, pages: u64, prot: u32, offset: u64| {
        vma(
            start,
            pages,
            prot,
            VmaKind::SysvShm {
                shmid: 3,
                object: ObjectId { dev: 1, ino: 3 },
                offset,
            },
        )
    };
    // Two attachments; the second lost its second page.
    let vmas = [
        part(0x10_0000, 4, 1, 0),
        part(0x20_0000, 1, 3, 0),
        part(0x20_2000, 2, 1, 0x2000),
    ];
    let p = make(&vmas, Vec::new()).unwrap();
    let attached: Vec<[u64; 3]> = p
        .before
        .iter()
        .filter(|c| c.nr == nr::SHMAT)
        .map(|c| [c.args[0], c.args[1], c.args[2]])
        .collect();
    assert_eq!(attached, vec![[3, 0x10_0000, SHM_RDONLY], [3, 0x20_0000, 0]]);
    let space = carry_out(&p);
    let pages: Vec<u64> = space.keys().copied().collect();
    assert_eq!(
        pages,
        vec![0x10_0000, 0x10_1000, 0x10_2000, 0x10_3000, 0x20_0000, 0x20_2000, 0x20_3000]
    );
    assert_eq!(space[&0x20_2000].0, 1);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let shared = |ino| VmaKind::Shared {
        object: ObjectId { dev: 1, ino },
        offset: 0,
        may_write: false,
    };
    assert!(make(&[vma(0x10_0000, 1, 1, shared(7))], vec![]).is_ok());
    assert!(matches!(
        make(&[vma(0x10_0000, 1, 1, shared(8))], vec![]),
        Err(MemoryError::Mapping(0x10_0000, _))
    ));
    let stray = make(&[vma(0x10_0000, 1, 1, shared(7))], vec![fill(0x10_0000, 1, 0)]);
    assert_eq!(stray.unwrap_err(), MemoryError::Stray(0x10_0000));
    let across = [vma(0x10_0000, 1, 3, anonymous()), vma(0x10_1000, 1, 3, anonymous())];
    assert_eq!(
        make(&across, vec![fill(0x10_0000, 2, 0)]).unwrap_err(),
        MemoryError::Stray(0x10_0000)
    );
    let other = make(&[vma(0x10_0000, 3, 5, VmaKind::Vdso("vdso".into()))], vec![]);
    assert!(matches!(other.unwrap_err(), MemoryError::Special(name, _) if name == "vdso"));
    let mut huge = vma(0x10_0000, 512, 3, anonymous());
    huge.flags.push("ht".into());
    assert!(make(&[huge], vec![]).is_err());
}

#[test]
fn huge_pages_are_mapped_as_such_and_read_at_once() {
    let mut huge = vma(0x20_0000, 512, 1, VmaKind::HugeTlb { page_bytes: 2 << 20 });
    huge.flags.push("ht".into());
    let p = make(&[huge], vec![fill(0x20_0000, 512, 0)]).unwrap();
    assert_eq!(p.fills.len(), 1);
    let map = p.before.iter().find(|c| c.nr == nr::MMAP).unwrap();
    assert_eq!(map.args[3], MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | 21 << 26);
    assert_eq!(carry_out(&p)[&0x20_0000].0, 1, "protected as it was");
}
