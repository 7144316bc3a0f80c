//! What the other hosts of a job have of its checkpoints, where all of it lies in the job directory: `verify`, `list`
//! and `gc` look at it too.

use super::*;

/// A job on two hosts with two checkpoints, which has been killed.
fn killed(place: &Place, label: &str) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, 2, 2)?;
    let program = job.program(place, "mpi/mpi_p2p")?;
    job.launch(&program)?;
    for _ in 0..2 {
        job.checkpoint()?;
    }
    job.crash();
    Ok(job)
}

/// Changes one bit of a page of every chunk of part 1.
fn flip(job: &Job) -> Result<(), Failure> {
    for chunk in files(&Path::new(&job.dir_of(1)).join("chunks"), ".bpg") {
        let mut bytes = io("read a chunk", std::fs::read(&chunk))?;
        bytes[5000] ^= 1;
        io("write a chunk", std::fs::write(&chunk, bytes))?;
    }
    Ok(())
}

/// What part 1 has is damaged, or missing: that is found.
pub(super) fn verify(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let job = killed(place, "hosts-verify")?;
    let finds = |verb: &str, words: &[&str]| {
        let o = job.belay(&[verb, &job.dir()])?;
        let found = words.iter().all(|w| text(&o).contains(w));
        want(found && (verb == "list" || !o.status.success()), || {
            format!("{verb} does not say {words:?}: {}: {}", show(o.status), text(&o))
        })
    };
    let said = job.must(&["verify"])?;
    want(said.matches(": whole").count() == 2, || format!("verify: {said}"))?;
    flip(&job)?;
    finds("verify", &["generation 1: part 1: ", "generation 2: part 1: ", "checksum"])?;
    flip(&job)?;
    job.must(&["verify"])?;
    let part = PathBuf::from(job.dir_of(1));
    let chunks = files(&part.join("chunks"), ".bpg");
    let chunk = chunks.first().ok_or("part 1 has no chunk")?;
    let away = chunk.with_extension("away");
    io("move a chunk", std::fs::rename(chunk, &away))?;
    finds("verify", &["generation 1: part 1: "])?;
    finds("list", &["damaged: part 1 lacks chunk"])?;
    io("move a chunk back", std::fs::rename(&away, chunk))?;
    io("remove a generation", std::fs::remove_dir_all(part.join("gen/000002")))?;
    finds(
        "verify",
        &["generation 1: whole", "generation 2: part 1: ", "1 of 2 generations"],
    )?;
    finds("list", &["damaged: part 1 lacks it"])?;
    io("remove the other part", std::fs::remove_dir_all(&part))?;
    finds("verify", &["generation 1: part 1: ", "generation 2: part 1: "])
}
