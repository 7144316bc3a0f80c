//! `tests/catalogue.txt`: what the kernel lets a program set, by the kernel's own headers, and what becomes of each of
//! it. A constant that is in the headers and not in the catalogue fails.

use crate::case::Case;
use crate::place::repository;
use crate::runner::Check;
use crate::Failure;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Attributes of one kind.
struct Family {
    name: String,
    sources: Vec<Source>,
    entries: Vec<Entry>,
}

/// Where names of a family come from: a header, or what is writable in a directory of procfs.
struct Source {
    path: String,
    patterns: Vec<String>,
}

/// Names that share a fate.
struct Entry {
    names: Vec<String>,
    fate: String,
}

/// Reads the catalogue.
fn parse(text: &str) -> Result<Vec<Family>, Failure> {
    let mut families: Vec<Family> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim_end();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = || format!("tests/catalogue.txt:{}: cannot be read: {line}", at + 1);
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            families.push(Family {
                name: name.into(),
                sources: Vec::new(),
                entries: Vec::new(),
            });
            continue;
        }
        let family = families.last_mut().ok_or_else(wrong)?;
        let (head, tail) = line.split_once(": ").ok_or_else(wrong)?;
        let words = |s: &str| s.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        match head.strip_prefix("from ") {
            Some(path) => family.sources.push(Source {
                path: path.into(),
                patterns: words(tail),
            }),
            None => family.entries.push(Entry {
                names: words(head),
                fate: tail.into(),
            }),
        }
    }
    Ok(families)
}

/// Whether `name` is what `pattern` says, in which a star stands for anything.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

impl Source {
    /// Patterns are looked at one after the other, and the last that fits decides; `!` takes away.
    fn wants(&self, name: &str) -> bool {
        let fitting = self.patterns.iter().rev().find(|p| matches(p.trim_start_matches('!'), name));
        fitting.is_some_and(|p| !p.starts_with('!'))
    }

    fn names(&self) -> Result<BTreeSet<String>, Failure> {
        let all = if self.path.starts_with('/') {
            writable(&self.path)?
        } else {
            names_of(&header(&self.path)?)
        };
        Ok(all.into_iter().filter(|n| self.wants(n)).collect())
    }
}

/// Files of a directory that somebody may write to.
fn writable(dir: &str) -> Result<Vec<String>, Failure> {
    use std::os::unix::fs::PermissionsExt;
    let failed = |e: std::io::Error| format!("{dir}: {e}");
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let meta = entry.metadata().map_err(failed)?;
        if meta.is_file() && meta.permissions().mode() & 0o222 != 0 {
            out.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(out)
}

/// The text of a header of the kernel's, of those that are installed or in `BELAY_KERNEL_HEADERS`.
fn header(name: &str) -> Result<String, Failure> {
    let root = std::env::var_os("BELAY_KERNEL_HEADERS").map_or_else(|| PathBuf::from("/usr/include"), PathBuf::from);
    let places = [root.join(name), root.join("x86_64-linux-gnu").join(name)];
    let found = places.iter().find_map(|p| std::fs::read_to_string(p).ok());
    found.ok_or_else(|| format!("no header {name} in {}: install linux-libc-dev", root.display()))
}

/// Names that a header defines: macros and enumerators.
fn names_of(text: &str) -> Vec<String> {
    let text = without_comments(text).replace("\\\n", " ");
    let mut out = Vec::new();
    let mut code = String::new();
    for line in text.lines() {
        match line.trim_start().strip_prefix('#') {
            Some(directive) => out.extend(
                directive
                    .trim_start()
                    .strip_prefix("define")
                    .filter(|rest| rest.starts_with(char::is_whitespace))
                    .and_then(first_word),
            ),
            None => {
                code.push_str(line);
                code.push(' ');
            }
        }
    }
    for body in code.split("enum").skip(1) {
        // `enum name {`, not the use of one.
        let Some((head, list)) = body.split_once('{') else { continue };
        if head.contains([';', '(', ')', ',']) {
            continue;
        }
        let list = list.split('}').next().unwrap_or_default();
        out.extend(list.split(',').filter_map(first_word));
    }
    out
}

fn without_comments(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((code, comment)) = rest.split_once("/*") {
        out.push_str(code);
        out.push(' ');
        rest = comment.split_once("*/").map_or("", |(_, after)| after);
    }
    out.push_str(rest);
    let lines = out.lines().map(|l| l.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

fn first_word(text: &str) -> Option<String> {
    let word: String = text
        .trim_start()
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect();
    (!word.is_empty()).then_some(word)
}

/// Words with one blank between them.
fn plain(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What is wrong with the fate of an entry: `tests` are those that there are, and whether each is refused.
fn wrong(fate: &str, tests: &HashMap<String, bool>, limits: &str) -> Option<String> {
    let named = |list: &str, refused: bool| {
        let bad = list.split_whitespace().find(|t| tests.get(*t) != Some(&refused))?;
        Some(match tests.get(bad) {
            None => format!("there is no test {bad}"),
            Some(_) if refused => format!("{bad} is not refused"),
            Some(_) => format!("{bad} is refused"),
        })
    };
    if let Some(list) = fate.strip_prefix("restored by ") {
        named(list, false)
    } else if let Some(list) = fate.strip_prefix("refused by ") {
        named(list, true)
    } else if let Some(phrase) = fate.strip_prefix("limits: ") {
        (!limits.contains(&plain(phrase))).then(|| format!("neither docs/limits.md nor a README says: {phrase}"))
    } else if fate.starts_with("nothing to keep: ") {
        None
    } else {
        Some(format!("no fate: {fate}"))
    }
}

fn read(path: &str) -> Result<String, Failure> {
    let path = repository().join(path);
    std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))
}

fn told(faults: &[String]) -> Result<(), Failure> {
    if faults.is_empty() {
        return Ok(());
    }
    Err(format!("{} faults:\n{}", faults.len(), faults.join("\n")))
}

/// Each constant of the headers is in the catalogue, once in each family.
fn headers() -> Result<(), Failure> {
    let mut faults = Vec::new();
    for family in parse(&read("tests/catalogue.txt")?)? {
        let mut known = BTreeSet::new();
        for name in family.entries.iter().flat_map(|e| &e.names) {
            if !known.insert(name.clone()) {
                faults.push(format!("[{}] {name} is there twice", family.name));
            }
        }
        for source in &family.sources {
            let found = source.names()?;
            if found.is_empty() {
                faults.push(format!(
                    "[{}] nothing in {} is what the patterns say",
                    family.name, source.path
                ));
            }
            let missing = found.iter().filter(|n| !known.contains(*n));
            faults.extend(missing.map(|n| format!("[{}] {n} ({}) is missing", family.name, source.path)));
        }
    }
    told(&faults)
}

/// Adds what the READMEs in `dir` and below say.
fn add_readmes(dir: &Path, text: &mut String) -> Result<(), Failure> {
    for entry in std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))? {
        let path = entry.map_err(|e| format!("{}: {e}", dir.display()))?.path();
        if path.is_dir() {
            add_readmes(&path, text)?;
        } else if path.file_name().is_some_and(|n| n == "README.md") {
            *text += &std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        }
    }
    Ok(())
}

/// All that the documents say of limits: docs/limits.md, and the fine print beside the code.
fn limits() -> Result<String, Failure> {
    let mut text = read("docs/limits.md")?;
    for room in ["capture", "restart", "coordinator", "plugins/src"] {
        add_readmes(&repository().join(room), &mut text)?;
    }
    Ok(plain(&text))
}

/// What each line says is so: the test is there, docs/limits.md or a README has the phrase.
fn fates(tests: &HashMap<String, bool>) -> Result<(), Failure> {
    let limits = limits()?;
    let mut faults = Vec::new();
    for family in parse(&read("tests/catalogue.txt")?)? {
        for entry in &family.entries {
            let fault = wrong(&entry.fate, tests, &limits);
            faults.extend(fault.map(|f| format!("[{}] {}: {f}", family.name, entry.names.join(" "))));
        }
    }
    told(&faults)
}

/// The checks of the catalogue, beside the tests that it names.
pub fn checks(cases: &[Case]) -> Vec<Check> {
    let tests: HashMap<String, bool> = cases.iter().map(|c| (c.name.clone(), c.refused.is_some())).collect();
    let tests = Arc::new(tests);
    vec![
        Check {
            name: "catalogue::headers".into(),
            run: Box::new(headers),
        },
        Check {
            name: "catalogue::fates".into(),
            run: Box::new(move || fates(&tests)),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_says_what_it_defines() {
        let text = "#ifndef X_H\n# define PR_A 1 /* PR_NOT */\n#define PR_B \\\n PR_A // PR_NOT\n\
                    enum kind { K_A, /* K_NOT, */\n#define K_A K_A\n K_B = 1 << 3,\n};\nenum kind f(int, int);\nstruct s { int PR_NOT; };\n";
        assert_eq!(names_of(text), ["PR_A", "PR_B", "K_A", "K_A", "K_B"]);
    }

    #[test]
    fn patterns_add_and_take_away() {
        let source = Source {
            path: String::new(),
            patterns: ["PR_*", "!PR_GET_*", "PR_GET_A", "*_END"].map(str::to_owned).into(),
        };
        for (name, wanted) in [
            ("PR_SET_A", true),
            ("PR_GET_B", false),
            ("PR_GET_A", true),
            ("X", false),
            ("X_END", true),
        ] {
            assert_eq!(source.wants(name), wanted, "{name}");
        }
        assert!(matches("A*B*C", "AxBxC") && !matches("A*B*C", "AxC") && !matches("A", "AB"));
    }

    #[test]
    fn a_fate_is_what_it_says() {
        let tests = HashMap::from([("kept".to_owned(), false), ("refused".to_owned(), true)]);
        let is = |fate: &str| wrong(fate, &tests, "one two three").is_none();
        assert!(is("restored by kept") && is("refused by refused") && is("limits: two  three") && is("nothing to keep: why"));
        assert!(
            !is("restored by refused")
                && !is("refused by kept")
                && !is("restored by none kept")
                && !is("limits: three two")
                && !is("later")
        );
    }
}
