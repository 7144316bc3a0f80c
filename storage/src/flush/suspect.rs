//! What is read wrongly, or contradicts its checksum, on a tier: suspect, until it is replaced or whole after all.

use super::tests::{bring, contents, lose_job, numbers, options, run, Dying};
use super::*;
use crate::catalogue::{mark, Catalogue};
use crate::fetch::fetch;
use crate::testing::Scratch;
use crate::tier::{read_whole, write_whole};

#[test]
fn a_record_that_is_read_wrongly_goes_only_when_it_is_not_needed_any_more() {
    let s = Scratch::new("wrongly");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    let mut commit = |n| {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
        run(&s, n, &tier, &options()).unwrap();
    };
    commit(1);
    let key = tier.list("gen").unwrap().remove(0).key;
    let good = read_whole(&tier, &key, 1 << 20).unwrap();
    write_whole(&tier, &key, b"no record").unwrap();
    commit(2);
    assert_eq!(numbers(&tier), [2]);
    // It was only the way to the tier.
    write_whole(&tier, &key, &good).unwrap();
    assert_eq!(numbers(&tier), [1, 2]);
    // The same generation once more: its record is written again, or another one, and that goes.
    let key = tier.list("gen").unwrap().remove(1).key;
    write_whole(&tier, &key, b"no record").unwrap();
    let other = "gen/000002-0123456789abcdef.json";
    write_whole(&tier, other, b"no record").unwrap();
    run(&s, 2, &tier, &options()).unwrap();
    assert_eq!((numbers(&tier), tier.length(other).unwrap()), (vec![1, 2], None));
    assert_eq!(tier.list("gen").unwrap().len(), 2);
    // It is old, and somebody has asked for it.
    let key = tier.list("gen").unwrap().remove(0).key;
    write_whole(&tier, &key, b"no record").unwrap();
    commit(3);
    assert!(tier.length(&key).unwrap().is_some());
    let mut checked = Catalogue::read(&tier, &Catalogue::default()).unwrap().forgotten();
    s.commit(&mut engine, 4, &Scratch::memory(50, 4));
    flush(
        &s.generation(4),
        &tier,
        &options(),
        &mut checked,
        &mut &[][..],
        &Control::default(),
    )
    .unwrap();
    assert_eq!((numbers(&tier), tier.length(&key).unwrap()), (vec![3, 4], None));
}

#[test]
fn a_suspect_pack_stays_until_what_replaces_it_is_there() {
    let s = Scratch::new("suspect");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    let memory = Scratch::memory(60, 1);
    for n in 1..=2 {
        s.commit(&mut engine, n, &memory);
        run(&s, n, &tier, &options()).unwrap();
    }
    let packs = |tier: &dyn Tier| -> Vec<String> { tier.list("packs").unwrap().into_iter().map(|o| o.key).collect() };
    let before = packs(&tier);
    for key in before.iter().filter(|key| key.starts_with("packs/000001")) {
        mark(&tier, key, "bit flips");
    }
    // Whoever reads the tier knows of it, and uses what there is where there is nothing better.
    let mut catalogue = Catalogue::read(&tier, &Catalogue::default()).unwrap();
    assert_eq!((catalogue.whole().len(), catalogue.doubtful().len()), (0, 2));
    assert_eq!(catalogue.suspect.len(), catalogue.faults.len());
    let here = contents(&s, 2);
    fetch(&s.job(), catalogue.doubtful()[1], &[(&tier, &catalogue)], &Control::default()).unwrap();
    assert!(contents(&s, 2) == here);
    // A flush that cannot be completed takes nothing away.
    let dying = Dying::new(&tier, 100_000);
    let again = |tier: &dyn Tier, catalogue: &mut Catalogue| {
        flush(
            &s.generation(2),
            tier,
            &options(),
            catalogue,
            &mut &[][..],
            &Control::default(),
        )
    };
    again(&dying, &mut catalogue).unwrap_err();
    // What is whole in packs that the record does not name is not durable yet: nothing keeps those.
    for left in (100_000..).step_by(1000) {
        tier.clear().unwrap();
        assert!(before.iter().all(|key| packs(&tier).contains(key)));
        catalogue = Catalogue::default();
        if again(&Dying::new(&tier, left), &mut catalogue).is_ok() {
            break;
        }
    }
    assert_eq!(numbers(&tier), [2]);
    let whole: Vec<u64> = catalogue.whole().iter().map(|g| g.manifest.generation).collect();
    assert_eq!(whole, [2], "the first one has nothing but the suspect packs");
    assert!(
        before.iter().all(|key| packs(&tier).contains(key)),
        "its record still names them"
    );
    s.commit(&mut engine, 3, &memory);
    flush(
        &s.generation(3),
        &tier,
        &options(),
        &mut catalogue,
        &mut &[][..],
        &Control::default(),
    )
    .unwrap();
    assert!(packs(&tier).iter().all(|key| !catalogue.suspect.contains_key(key)));
    assert!(!packs(&tier).iter().any(|key| key.starts_with("packs/000001")) && catalogue.suspect.is_empty());
    assert_eq!(tier.list("suspect").unwrap(), [], "marks go with their packs");
    assert_eq!(numbers(&tier), [2, 3]);
    let before = contents(&s, 3);
    lose_job(&s);
    assert_eq!(bring(&s, &[&tier]).unwrap(), 3);
    assert!(contents(&s, 3) == before);
}

#[test]
fn only_what_contradicts_its_checksum_is_suspect_and_what_is_whole_after_all_is_not() {
    let s = Scratch::new("moment");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    s.commit(&mut engine, 1, &Scratch::memory(20, 1));
    run(&s, 1, &tier, &options()).unwrap();
    let read = || Catalogue::read(&tier, &Catalogue::default()).unwrap();
    let errno = libc::EIO;
    let unreadable = || Dying {
        errno,
        ..Dying::new(&tier, 0)
    };
    // Nothing can be read, for a moment.
    let mut catalogue = read();
    assert!(!catalogue.check(&unreadable()).unwrap().1.is_empty());
    let after = Catalogue::read(&tier, &catalogue).unwrap();
    assert_eq!(after.whole(), Vec::<&Listed>::new(), "not for who has just seen it");
    lose_job(&s);
    let catalogue = read();
    let unreadable = unreadable();
    let sources: [(&dyn Tier, &Catalogue); 1] = [(&unreadable, &catalogue)];
    std::fs::create_dir(s.job().join("gen")).unwrap();
    fetch(&s.job(), catalogue.whole()[0], &sources, &Control::default()).unwrap_err();
    assert_eq!((tier.list("suspect").unwrap(), numbers(&tier)), (vec![], vec![1]));
    // Somebody was wrong.
    mark(&tier, &tier.list("packs").unwrap()[0].key, "bit flips");
    let mut catalogue = read();
    let running = catalogue.clone();
    assert_eq!(catalogue.whole(), Vec::<&Listed>::new());
    assert_eq!(catalogue.check(&tier).unwrap().1, Vec::<String>::new());
    assert_eq!((catalogue.whole().len(), catalogue.faults.len()), (1, 0));
    let running = Catalogue::read(&tier, &running).unwrap();
    assert_eq!(running.whole().len(), 1, "also for who had seen the mark");
    assert_eq!((tier.list("suspect").unwrap(), numbers(&tier)), (vec![], vec![1]));
}

#[test]
fn what_has_no_name_of_a_record_is_none() {
    let s = Scratch::new("foreign");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    let foreign = ["gen/x", "gen/1-0123456789abcdef.json", "gen/000001-0123456789ABCDEF.json"];
    for key in foreign {
        write_whole(&tier, key, b"no record").unwrap();
    }
    s.commit(&mut engine, 1, &Scratch::memory(20, 1));
    let c = Catalogue::read(&tier, &Catalogue::default()).unwrap();
    assert_eq!(
        (c.faults.len(), c.numbers().len()),
        (foreign.len(), 0),
        "it is told, and has no number"
    );
    run(&s, 1, &tier, &options()).unwrap();
    assert_eq!((numbers(&tier), tier.list("gen").unwrap().len()), (vec![1], 1));
}
