//! Images that are right but for the values in them: a real one is decoded, values are changed, and it is encoded
//! again, checksums and all.

use crate::mutate::NUMBERS;
use belay_image::extents::{self, Extent, PAGE};
use belay_image::sections::{Kind, SectionFile};
use fastrand::Rng;
use serde_json::Value;
use std::path::Path;
use std::sync::OnceLock;

/// Changes that are made at a time.
const MOST: usize = 16;

/// A real image: its job, its descriptors, and where the memory of one of its processes lies.
struct Image {
    job: Value,
    descriptors: Value,
    extents: Vec<Extent>,
}

fn image() -> &'static Image {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
        let read = |name: &str| std::fs::read(corpus.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let json = |name: &str| serde_json::from_slice(&read(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        Image {
            job: json("job/many.json"),
            descriptors: json("descriptors/many.json"),
            extents: extents::decode(&corpus, &read("extents/many.bidx.raw")).unwrap_or_else(|e| panic!("{e}")),
        }
    })
}

/// Each four bytes of `data` choose one change.
pub(crate) fn values(data: &[u8]) {
    let image = image();
    let (mut job, mut descriptors, mut table) = (image.job.clone(), image.descriptors.clone(), image.extents.clone());
    for seed in data.as_chunks::<4>().0.iter().take(MOST) {
        let mut rng = Rng::with_seed(u32::from_le_bytes(*seed).into());
        match rng.u32(0..8) {
            0 => move_extent(&mut rng, &mut table),
            1..=4 => change(&mut rng, &mut job),
            _ => change(&mut rng, &mut descriptors),
        }
    }
    let mut file = SectionFile::new();
    let pushed = file
        .push_json(Kind::Job, &job)
        .and_then(|()| file.push_json(Kind::Descriptors, &descriptors));
    assert!(pushed.is_ok());
    file.push(Kind::Extents, extents::encode(&table));
    let here = Path::new("input");
    let again = SectionFile::decode(here, &file.encode()).unwrap_or_else(|e| panic!("{e}"));
    let table = again
        .get(Kind::Extents)
        .and_then(|raw| extents::decode(here, raw))
        .unwrap_or_default();
    let may_be = belay_restart::fuzzing::check(&again, &table);
    assert!(may_be || !data.is_empty(), "the image as it is");
}

fn move_extent(rng: &mut Rng, table: &mut [Extent]) {
    let at = rng.usize(0..table.len());
    let number = number(rng);
    match rng.u32(0..4) {
        0 => table[at].vaddr = number & !(PAGE - 1),
        1 => table[at].bytes = (number % (1 << 20)) * PAGE,
        2 => table[at].chunk = number as u32,
        _ => table[at].page = number as u32,
    }
}

/// Changes one value somewhere in `value`.
fn change(rng: &mut Rng, value: &mut Value) {
    let here = rng.u32(0..12) == 0;
    match value {
        Value::Array(list) if !list.is_empty() && !here => {
            let n = rng.usize(0..list.len());
            change(rng, &mut list[n]);
        }
        Value::Object(fields) if !fields.is_empty() && !here => {
            let n = rng.usize(0..fields.len());
            fields.values_mut().skip(n).take(1).for_each(|field| change(rng, field));
        }
        value => replace(rng, value),
    }
}

fn replace(rng: &mut Rng, value: &mut Value) {
    match (rng.u32(0..6), &mut *value) {
        // A list with one more, one less, or in another order.
        (0 | 1, Value::Array(list)) if !list.is_empty() => {
            let (from, to) = (rng.usize(0..list.len()), rng.usize(0..list.len()));
            match rng.u32(0..3) {
                0 => list.insert(to, list[from].clone()),
                1 => drop(list.remove(from)),
                _ => list.swap(from, to),
            }
        }
        (2, Value::Array(list)) => list.clear(),
        (_, Value::Number(_)) => *value = some_number(rng),
        (_, Value::Bool(b)) => *b = !*b,
        (0, Value::String(text)) => text.clear(),
        (1, Value::String(text)) => text.push('\0'),
        (2, Value::String(text)) => *text = "/".repeat(5000),
        (3, Value::String(text)) => *text = format!("/..{text}"),
        (4, Value::String(_)) => *value = Value::from(vec![0xffu8, 0x80, 0x2f]),
        (_, Value::Null) => *value = some_number(rng),
        (0, other) => *other = Value::Null,
        (_, other) => *other = some_number(rng),
    }
}

fn some_number(rng: &mut Rng) -> Value {
    match rng.u32(0..6) {
        0 => Value::from(number(rng).cast_signed()),
        1 => Value::from(rng.u32(0..16)),
        2 => Value::from(-i64::from(rng.u32(0..16))),
        3 => Value::from(25224 + rng.u32(0..3)),
        4 => Value::from(1e308),
        _ => Value::from(number(rng)),
    }
}

fn number(rng: &mut Rng) -> u64 {
    rng.choice(NUMBERS).unwrap_or(0)
}
