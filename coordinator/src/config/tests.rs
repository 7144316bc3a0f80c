use super::*;
use crate::verbs::Enable;

const GOOD: &str = r#"
[[tier]]
name = "scratch"
kind = "pfs"
path = "/scratch/me"
capacity = "2G"

[[tier]]
name = "cloud"
kind = "object"
url = "s3://bucket/prefix"

[flush]
threads = 2
rate = 1000
zstd = 3
"#;

fn refused(text: &str) -> String {
    let fault = Config::default().add(text).unwrap_err();
    fault.locate(Path::new("/x/belay.toml"), text)
}

#[test]
fn later_files_lie_over_earlier_ones() {
    let mut c = Config::default();
    c.add(GOOD).unwrap();
    c.add("[[tier]]\nname = \"scratch\"\nkind = \"pfs\"\npath = \"/other\"\n[flush]\nzstd = \"auto\"")
        .unwrap();
    assert_eq!(c.tiers.len(), 2);
    assert_eq!(c.tiers[0].path.as_deref(), Some(Path::new("/other")));
    assert_eq!(c.tiers[0].capacity, None);
    assert_eq!((c.flush.threads, c.flush.rate), (Some(2), Some(Size(1000))));
    assert_eq!((c.flush.zstd, c.durable().count()), (Some(Compression::Auto), 2));
    let stored = serde_json::to_string(&c).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&stored).unwrap(), c);
}

#[test]
fn the_tree_has_a_fan_out_of_its_own_or_the_usual_one() {
    let mut c = Config::default();
    assert_eq!(c.tree.fan_out(), 16);
    for n in [1, 1024] {
        c.add(&format!("[tree]\nfan_out = {n}")).unwrap();
        c.add("[tree]").unwrap();
        assert_eq!(c.tree.fan_out(), n);
    }
    c.add("[tree]\nlisten = [\"ib0\", \"10.0.0.0/8\"]").unwrap();
    c.add("[tree]").unwrap();
    assert!(c
        .add("[tree]\nlisten = [\"10.0.0.0/99\"]")
        .unwrap_err()
        .what
        .contains("0 to 32 bits"));
    let stored = serde_json::to_string(&c).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&stored).unwrap().tree.fan_out(), 1024);
    assert_eq!(
        serde_json::from_str::<Config>(&stored).unwrap().tree.listen(),
        ["ib0", "10.0.0.0/8"]
    );
    assert_eq!(serde_json::from_str::<Config>("{}").unwrap().tree.fan_out(), 16);
}

#[test]
fn the_gate_has_a_limit_of_its_own_or_the_usual_one() {
    let mut c = Config::default();
    assert_eq!(c.gate.limit(), belay_plugins::gate::LIMIT);
    assert_eq!(c.gate.rebuild(), belay_plugins::gate::REBUILD_LIMIT);
    c.add("[gate]\nlimit = \"500ms\"").unwrap();
    c.add("[gate]\nrebuild = \"1m\"").unwrap();
    let stored = serde_json::to_string(&c).unwrap();
    let kept: Config = serde_json::from_str(&stored).unwrap();
    assert_eq!((kept.gate.limit().as_millis(), kept.gate.rebuild().as_secs()), (500, 60));
    assert!(c.add("[gate]\nlimit = \"2h\"").unwrap_err().what.contains("1ms to 1h"));
    assert!(c.add("[gate]\nrebuild = \"2h\"").unwrap_err().what.contains("1ms to 1h"));
    assert_eq!(serde_json::from_str::<Config>("{}").unwrap().gate, Gate::default());
}

#[test]
fn the_library_for_infiniband_is_off_unless_asked_for() {
    let mut c = Config::default();
    assert_eq!(c.verbs.enable.unwrap_or_default(), Enable::Auto);
    c.add("[verbs]\nenable = \"on\"").unwrap();
    c.add("[verbs]").unwrap();
    let stored = serde_json::to_string(&c).unwrap();
    let kept: Config = serde_json::from_str(&stored).unwrap();
    assert_eq!(kept.verbs.enable, Some(Enable::On));
    assert!(c.add("[verbs]\nenable = \"perhaps\"").unwrap_err().what.contains("auto"));
}

#[test]
fn keys_come_from_one_place_that_a_later_file_may_change() {
    let mut c = Config::default();
    assert!(!c.encryption.is_on());
    c.add("[encryption]\nkey_file = \"/etc/belay/keys\"").unwrap();
    c.add("[encryption]\nkey_command = [\"vault\", \"read\"]").unwrap();
    assert!(c.encryption.is_on() && c.encryption.key_file.is_none());
    let stored = serde_json::to_string(&c).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&stored).unwrap(), c);
    for (text, words) in [
        ("key_file = \"keys\"", "absolute"),
        ("", "is needed"),
        ("key_command = []", "a command"),
        ("key_command = [\"x\"]\nkey_file = \"/x\"", "one of them"),
        ("key = \"0\"", "`key_file` or `key_command`"),
    ] {
        let message = refused(&format!("[encryption]\n{text}"));
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn every_object_store_can_be_named() {
    for url in ["gs://b/p", "az://c", "abfs://c/p", "abfss://c@a.dfs.core.windows.net/p"] {
        let mut c = Config::default();
        c.add(&GOOD.replacen("s3://bucket/prefix", url, 1)).unwrap();
        assert_eq!(c.tiers[1].url.as_deref(), Some(url));
    }
}

#[test]
fn errors_name_line_key_and_what_is_allowed() {
    for (change, words) in [
        (
            ("kind = \"pfs\"", "kind = \"tape\""),
            &["line 4", "kind", "`memory`, `local`, `pfs`, `object`"][..],
        ),
        (("threads = 2", "threads = \"two\""), &["line 14", "threads", "u32"]),
        (("threads = 2", "threads = 0"), &["threads", "1 to 64"]),
        (
            ("threads = 2", "thread = 2"),
            &["line 14", "thread", "`threads`, `rate`, `zstd`, `verify`"],
        ),
        (("rate = 1000", "rate = \"1X\""), &["line 15", "rate", "K, M, G or T"]),
        (("zstd = 3", "zstd = 20"), &["line 16", "zstd", "1 to 19"]),
        (
            ("path = \"/scratch/me\"", "path = \"scratch\""),
            &["line 2", "scratch", "path", "absolute"],
        ),
        (
            ("url = \"s3://bucket/prefix\"", "url = \"x\""),
            &[
                "line 8",
                "cloud",
                "url",
                "s3://BUCKET/PREFIX",
                "gs://BUCKET",
                "az://CONTAINER",
            ],
        ),
        (
            ("url = \"s3://bucket/prefix\"", "url = \"gs://bucket\"\nregion = \"x\""),
            &["line 8", "cloud", "region", "s3://"],
        ),
        (
            ("url = \"s3://bucket/prefix\"", "url = \"file:///scratch/me\""),
            &["line 8", "cloud", "url", "kind = \"pfs\"", "path"],
        ),
        (("name = \"cloud\"", "name = \"a/b\""), &["line 8", "name", "a/b"]),
        (("[flush]", "[flsh]"), &["line 13", "flsh", "`tier`, `flush`, `placement`"]),
        (("name = \"cloud\"\n", ""), &["line", "`name`"]),
        (("[flush]", "[flush"), &["line 13"]),
        (
            ("[flush]", "[redundancy]\nscheme = \"raid\"\n[flush]"),
            &["line 14", "scheme", "reed-solomon"],
        ),
        (
            ("[flush]", "[tree]\nfan_out = 0\n[flush]"),
            &["line 13", "fan_out", "1 to 1024"],
        ),
        (
            ("[flush]", "[tree]\nfan_out = \"2\"\n[flush]"),
            &["line 14", "fan_out", "u32"],
        ),
        (
            ("[flush]", "[redundancy]\nlocal = \"x\"\n[flush]"),
            &["line 13", "local", "absolute"],
        ),
    ] {
        let message = refused(&GOOD.replacen(change.0, change.1, 1));
        for w in words.iter().chain(&["/x/belay.toml"]) {
            assert!(message.contains(w), "{change:?}: {message:?} does not name {w:?}");
        }
    }
}

#[test]
fn saved_files_are_read_as_people_and_older_jobs_write_them() {
    let read = |json: &str| serde_json::from_str::<SavedFiles>(json).ok();
    for (json, expected) in [
        ("\"none\"", Some(SavedFiles::NONE)),
        ("\"all\"", Some(SavedFiles::ALL)),
        ("\"2M\"", Some(SavedFiles(2 << 20))),
        ("false", Some(SavedFiles::NONE)),
        ("true", Some(SavedFiles::ALL)),
        ("\"much\"", None),
        ("-1", None),
    ] {
        assert_eq!(read(json), expected, "{json}");
    }
    for kept in [SavedFiles::NONE, SavedFiles::ALL, SavedFiles::default()] {
        assert_eq!(read(&serde_json::to_string(&kept).unwrap()), Some(kept));
    }
}
