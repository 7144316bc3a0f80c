//! Global arrays, which processes have in parts: put together where all parts are of one moment.

use super::{stored, table, whole, Chunks, Made, Memory, Names, Part, Piece};
use belay_access::block::{Block, MAX_DIMS};
use belay_access::global::{self, Run, Uncovered};
use belay_access::index::{Global, Point, Portable};
use belay_access::shape::Shape;
use belay_coordinator::{plain, Failure};
use belay_image::model::{self, Dataset, Process};
use belay_wire::Exit;
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// What helps where the moment is wrong.
const NEXT: &str =
    "take one while all processes come to belay_point (belay checkpoint), or export what each process has (--by-process)";

/// A global array that can be put together.
#[derive(Debug)]
struct Array {
    name: String,
    elem: u64,
    /// Elements in each dimension, as many as processes have said.
    extent: Vec<u64>,
    sides: [u64; MAX_DIMS],
    pieces: Vec<Own>,
}

/// What a process has of it.
#[derive(Debug)]
struct Own {
    /// Which part of the job, and which process of it.
    of: (usize, usize),
    who: String,
    shape: Shape,
    part: global::Part,
}

/// The global arrays of a generation, all of one moment.
#[derive(Debug)]
pub(super) struct Plan {
    point: Point,
    arrays: Vec<Array>,
    /// Bytes that they take on a disk, at most.
    pub(super) bytes: u64,
}

fn refused<T>(why: impl std::fmt::Display) -> Result<T, Failure> {
    Err(Failure::new(
        Exit::Refused,
        format!("the global arrays are not exported: {why}"),
    ))
}

impl Plan {
    /// The global arrays of which processes have declared their parts; none where there are none.
    pub(super) fn of(parts: &[Part]) -> Result<Option<Self>, Failure> {
        let (mut arrays, mut bytes) = (Vec::new(), 0u64);
        // Where the first of these processes was.
        let mut first: Option<(String, &model::Point)> = None;
        for (n, part) in parts.iter().enumerate() {
            for (at, p) in part.job.processes.iter().enumerate() {
                let shared = || p.datasets.iter().filter(|d| d.share.is_some());
                if shared().next().is_none() {
                    continue;
                }
                let who = format!("process {} on {}", p.pid, plain(&part.job.host));
                let Some(point) = &p.point else {
                    return refused(format!(
                        "{who} did not wait in belay_point, so what the processes have is not of one moment; {NEXT}"
                    ));
                };
                match &first {
                    None => first = Some((who.clone(), point)),
                    Some((other, same)) => is_same((other, same), (&who, point))?,
                }
                let table = table(&part.dir, p)?;
                for d in shared() {
                    let own = Own::of((n, at), &who, (p, d), part.lacks)?;
                    bytes = bytes.saturating_add(stored(&table, &own.shape));
                    add(&mut arrays, d, own)?;
                }
            }
        }
        let Some((_, point)) = first else { return Ok(None) };
        for array in &arrays {
            array.is_whole()?;
        }
        let point = Point::new(point.number, &point.payload);
        if point.bytes().is_none() {
            return refused("the payload of the point is too long");
        }
        Ok(Some(Self { point, arrays, bytes }))
    }

    /// Writes them, and says in `index` what they are; how many there are, and the bytes of their elements.
    pub(super) fn write(
        &self,
        parts: &[Part],
        (made, names): (&mut Made, &mut Names),
        index: &mut Portable,
    ) -> Result<(usize, u64), Failure> {
        let (mut files, mut all) = (Vec::new(), 0);
        for array in &self.arrays {
            let name = names.unused(&array.name, "global");
            let (path, file) = made.file(&name)?;
            let bytes = global::bytes(array.elem, &array.sides).unwrap_or(0);
            let sized = file.set_len(bytes);
            sized.map_err(|e| Failure::io(format!("write {}", path.display()), &e))?;
            all += bytes;
            files.push((path, file));
            index.global.push(Global {
                file: name,
                name: array.name.clone(),
                elem: array.elem,
                extent: array.extent.clone(),
            });
        }
        index.point = Some(self.point.clone());
        for (n, part) in parts.iter().enumerate() {
            let mut chunks = Chunks::listed(&part.dir)?;
            for (at, p) in part.job.processes.iter().enumerate() {
                let its = |own: &&Own| own.of == (n, at);
                let mut pieces = self.arrays.iter().zip(&files);
                let mut pieces = pieces
                    .by_ref()
                    .flat_map(|(a, to)| a.pieces.iter().filter(its).map(move |own| (own, to)));
                let Some(one) = pieces.next() else { continue };
                let mut memory = Memory::of(table(&part.dir, p)?, &mut chunks);
                for (own, to) in std::iter::once(one).chain(pieces) {
                    own.write(to, &mut memory)?;
                }
            }
        }
        Ok((self.arrays.len(), all))
    }
}

/// Whether two processes were at the same point, with the same payload.
fn is_same((first, one): (&str, &model::Point), (second, other): (&str, &model::Point)) -> Result<(), Failure> {
    if one.number != other.number {
        let [one, other] = [one.number, other.number];
        return refused(format!(
            "{first} waited in its belay_point number {one}, and {second} in number {other}; {NEXT}"
        ));
    }
    if one.payload != other.payload {
        return refused(format!(
            "{first} and {second} have given different payloads to belay_point: it is the same in all processes"
        ));
    }
    Ok(())
}

/// Adds what a process has of an array to those that are known.
fn add(arrays: &mut Vec<Array>, d: &Dataset, own: Own) -> Result<(), Failure> {
    let Ok(name) = std::str::from_utf8(d.name.as_bytes()) else {
        return refused(format!("the name of array {} is no text", plain(&d.name.to_string())));
    };
    let (sides, dims) = (own.part.global(), d.extent.len());
    let Some(array) = arrays.iter_mut().find(|a| a.name == name) else {
        arrays.push(Array {
            name: name.into(),
            elem: d.elem,
            extent: sides[..dims].to_vec(),
            sides,
            pieces: vec![own],
        });
        return Ok(());
    };
    if (array.elem, array.sides, array.extent.len()) != (d.elem, sides, dims) {
        let first = array.pieces.first().map_or("", |own| &own.who);
        let who = &own.who;
        return refused(format!(
            "{first} and {who} disagree about array {}: about bytes of an element, or about its extent",
            plain(name)
        ));
    }
    array.pieces.push(own);
    Ok(())
}

impl Array {
    /// Whether each of its elements is one process's own.
    fn is_whole(&self) -> Result<(), Failure> {
        let owners = self.pieces.iter().filter_map(|own| Some((own, own.part.own_in_global()?)));
        let (owners, boxes): (Vec<&Own>, Vec<Block>) = owners.unzip();
        let name = plain(&self.name);
        match global::covers(&self.sides, &boxes) {
            Ok(()) => Ok(()),
            Err(Uncovered::Gap(missing)) => refused(format!("{missing} elements of array {name} are no process's own")),
            Err(Uncovered::Overlap(one, other)) => {
                let [one, other] = [one, other].map(|n| &owners[n].who);
                refused(format!("{one} and {other} both own some elements of array {name}"))
            }
        }
    }
}

/// A number for each dimension, of each list, as [`Part::new`](global::Part::new) takes them.
type Lists = ([u64; MAX_DIMS], [i64; MAX_DIMS], ([u64; MAX_DIMS], [u64; MAX_DIMS]));

/// What an image says of a part of a global array; none where it has not as many dimensions as the dataset.
fn lists(d: &Dataset) -> Option<Lists> {
    let s = d.share.as_ref()?;
    let lengths = [s.global.len(), s.lower.len(), s.lo.len(), s.hi.len(), d.stride.len()];
    if lengths != [d.extent.len(); 5] {
        return None;
    }
    let own = (global::sides(&s.lo, 0)?, global::sides(&s.hi, 1)?);
    Some((global::sides(&s.global, 1)?, global::sides(&s.lower, 0)?, own))
}

impl Own {
    fn of(of: (usize, usize), who: &str, (p, d): (&Process, &Dataset), lacks: bool) -> Result<Self, Failure> {
        let name = plain(&d.name.to_string());
        let wrong = |why: &str| refused(format!("{name} of {who}: {why}"));
        let shape = match whole((p, d), lacks) {
            Ok(shape) => shape,
            Err(why) => return wrong(&why),
        };
        let Some((sides, lower, own)) = lists(d) else {
            return wrong("its part of the global array has other dimensions than itself");
        };
        match global::Part::new(shape, sides, lower, own) {
            Err(why) => wrong(&why.to_string()),
            Ok(part) => Ok(Self {
                of,
                who: who.into(),
                shape,
                part,
            }),
        }
    }

    /// Writes what is its own to where it belongs; what is not stored is zero, as the file is already.
    fn write(&self, (path, file): &(PathBuf, File), memory: &mut Memory<'_>) -> Result<(), Failure> {
        let Some(own) = self.part.own() else { return Ok(()) };
        let mut out = Out {
            path,
            file: BufWriter::new(file),
            at: None,
        };
        let elem = self.shape.elem;
        self.part.try_runs(&own, &mut |run: Run| {
            if run.step == elem {
                return out.copy(memory, (run.address, run.count * elem), run.offset);
            }
            (0..run.count).try_for_each(|n| out.copy(memory, (run.address + n * run.step, elem), run.offset + n * elem))
        })?;
        out.file.flush().map_err(|e| out.failed(&e))
    }
}

/// A file that is written in any order.
struct Out<'a> {
    path: &'a Path,
    file: BufWriter<&'a File>,
    /// Where it is written next; at first nobody knows.
    at: Option<u64>,
}

impl Out<'_> {
    fn failed(&self, e: &std::io::Error) -> Failure {
        Failure::io(format!("write {}", self.path.display()), e)
    }

    /// Copies so many bytes of memory to `offset`.
    fn copy(&mut self, memory: &mut Memory<'_>, (start, bytes): (u64, u64), offset: u64) -> Result<(), Failure> {
        let (mut at, end) = (start, start + bytes);
        while at < end {
            match memory.at(at, end)? {
                Piece::Hole(bytes) => at += bytes,
                Piece::Bytes(bytes) => {
                    let to = offset + (at - start);
                    let moved = if self.at == Some(to) {
                        Ok(to)
                    } else {
                        self.file.seek(SeekFrom::Start(to))
                    };
                    moved.and_then(|_| self.file.write_all(bytes)).map_err(|e| self.failed(&e))?;
                    at += bytes.len() as u64;
                    self.at = Some(to + bytes.len() as u64);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(number: u64, payload: &[u8]) -> model::Point {
        let payload = payload.to_vec();
        model::Point { number, payload }
    }

    #[test]
    fn only_what_is_of_one_moment_belongs_together() {
        let why = |one: &model::Point, other: &model::Point| {
            let refused = is_same(("process 1", one), ("process 2", other));
            refused.err().map(|f| (f.exit, f.to_string()))
        };
        let here = point(7, b"seven");
        assert_eq!(why(&here, &here.clone()), None);
        let (exit, said) = why(&here, &point(8, b"seven")).unwrap();
        assert!(
            exit == Exit::Refused && said.contains("number 7, and process 2 in number 8"),
            "{said}"
        );
        assert!(why(&here, &point(7, b"eight")).unwrap().1.contains("different payloads"));
    }

    #[test]
    fn a_part_that_an_image_says_is_checked() {
        let dataset = |extent: &[u64], share: Option<model::Share>| Dataset {
            name: "a".into(),
            address: 1 << 32,
            elem: 8,
            extent: extent.to_vec(),
            stride: vec![8; extent.len()],
            share,
        };
        let share = |global: &[u64], hi: u64| model::Share {
            global: global.to_vec(),
            lower: vec![0; global.len()],
            lo: vec![0; global.len()],
            hi: vec![hi; global.len()],
        };
        let lists = |d: &Dataset| lists(d).map(|(global, ..)| global);
        assert_eq!(lists(&dataset(&[4], Some(share(&[9], 4)))), Some([9, 1, 1, 1, 1]));
        assert_eq!(lists(&dataset(&[4], Some(share(&[9, 9], 4)))), None);
        assert_eq!(lists(&dataset(&[1; 6], Some(share(&[9; 6], 1)))), None);
        assert_eq!(lists(&dataset(&[], Some(share(&[], 1)))), None);
        assert_eq!(lists(&dataset(&[4], None)), None);
    }
}
