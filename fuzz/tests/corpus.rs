//! The corpus is what this version writes: nothing is reached by what it refuses at once.

use belay_fuzz::{engine, targets};
use belay_image::extents;
use belay_image::model::Job;
use belay_image::sections::{Kind, SectionFile};
use belay_plugins::Descriptors;
use std::path::Path;

#[test]
fn images_are_of_todays_format() {
    let here = Path::new("corpus/image");
    let target = targets::ALL.iter().find(|t| t.name == "image").unwrap();
    let files: Vec<SectionFile> = engine::corpus(target)
        .iter()
        .map(|data| SectionFile::decode(here, data).unwrap())
        .collect();
    let jobs = files.iter().filter(|f| f.get_json::<Job>(Kind::Job).is_ok());
    let jobs = jobs.filter(|f| f.get_json::<Descriptors>(Kind::Descriptors).is_ok());
    let tables = files.iter().filter_map(|f| f.get(Kind::Extents).ok());
    let tables = tables.filter(|raw| extents::decode(here, raw).is_ok());
    assert_eq!((jobs.count(), tables.count()), (2, files.len() - 2));
}

#[test]
fn what_is_sealed_opens() {
    let target = targets::ALL.iter().find(|t| t.name == "sealed").unwrap();
    let open = engine::corpus(target)
        .iter()
        .filter(|data| belay_storage::fuzzing::opens(data))
        .count();
    assert_eq!(open, 1);
}
