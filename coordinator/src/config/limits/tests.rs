use super::*;

const SITES: &str = "[checkpoints]\nkeep = 5\nmax_bytes = \"2G\"\nroots = [\"/proc\", \"/usr\"]\n";

/// What these files say, the site's and the user's own.
fn limits(site: &str, own: &str) -> (Config, Limits) {
    let (mut c, mut l) = (Config::default(), Limits::default());
    c.lay(&mut l, Path::new(SITE), site).unwrap();
    l.note_site(&c);
    c.lay(&mut l, Path::new("/home/me/belay.toml"), own).unwrap();
    (c, l)
}

fn not_allowed(r: Result<(), Failure>, words: &[&str]) {
    let f = r.unwrap_err();
    assert_eq!(f.exit, Exit::NotAllowed, "{f}");
    for w in words {
        assert!(f.message.contains(w), "{f} does not mention {w}");
    }
}

#[test]
fn defaults_are_those_of_the_last_file_that_has_one() {
    for (site, own, keep, bytes) in [
        ("", "", 2, None),
        (SITES, "", 5, Some(2 << 30)),
        ("", SITES, 5, Some(2 << 30)),
        (SITES, "[checkpoints]\nkeep = 1\nmax_bytes = 7", 1, Some(7)),
        // A file that serves several sites is cut to what this one allows.
        (SITES, "[checkpoints]\nmax_bytes = \"3G\"", 5, Some(2 << 30)),
    ] {
        let (_, l) = limits(site, own);
        assert_eq!((l.keep(None), l.max_bytes(None)), (keep, Ok(bytes)), "{site} {own}");
        assert_eq!(l.keep(Some(9)), 9);
    }
}

#[test]
fn an_option_goes_before_the_users_limit_and_not_above_the_sites() {
    let (_, l) = limits(SITES, "[checkpoints]\nmax_bytes = 7");
    assert_eq!(l.max_bytes(Some(2 << 30)), Ok(Some(2 << 30)));
    let asked = (2 << 30) + 1;
    let words = [
        "--max-bytes",
        "2147483649",
        "/etc/belay/belay.toml, line 3, max_bytes",
        "2147483648",
    ];
    not_allowed(l.max_bytes(Some(asked)).map(drop), &words);
    let (_, l) = limits("", "[checkpoints]\nmax_bytes = 7");
    assert_eq!(l.max_bytes(Some(asked)), Ok(Some(asked)));
}

#[test]
fn a_job_of_before_the_limit_gets_it_at_its_restart() {
    let (_, l) = limits(SITES, "[checkpoints]\nmax_bytes = 7");
    for launched in [None, Some((2 << 30) + 1)] {
        let (most, why) = l.lowered(launched).unwrap();
        assert_eq!(most, 2 << 30);
        assert!(why.contains("/etc/belay/belay.toml, line 3"), "{why}");
    }
    assert_eq!(l.lowered(Some(2 << 30)), None);
    assert_eq!(limits("", SITES).1.lowered(None), None);
}

#[test]
fn a_directory_lies_below_a_root_of_each_file() {
    let (_, l) = limits(SITES, "[checkpoints]\nroots = [\"/usr/lib\", \"/var\", \"/nothing/there\"]");
    let may = |dir: &str| l.check_job(Path::new(dir), Use::New);
    may("/usr/lib/job").unwrap();
    may("/usr/lib/../lib/new/job").unwrap();
    may("/usr/lib").unwrap();
    let site = ["/etc/belay/belay.toml, line 4, roots", "/proc, /usr", "--ckpt-dir"];
    not_allowed(may("/var/job"), &[&site[..], &["job directory /var/job"]].concat());
    not_allowed(may("/usr/lib/../../var/job"), &[&site[..], &["which is /var/job"]].concat());
    not_allowed(may("/usrx/job"), &site);
    not_allowed(may("/nothing/there/job"), &site);
    let (_, own) = limits("", "[checkpoints]\nroots = [\"/nothing/there\"]");
    not_allowed(
        own.check_job(Path::new("/nothing/there/job"), Use::New),
        &["/nothing/there (no such file or directory)"],
    );
    not_allowed(
        may("/usr/share/job"),
        &["/home/me/belay.toml, line 2, roots", "/usr/lib, /var"],
    );
    not_allowed(l.check_job(Path::new("relative"), Use::Old), &["move it there"]);
    // Nobody can tell where that would be.
    let lies = ["/usr/lib/new/../job, of which nobody can tell", "line 4, roots", "--ckpt-dir"];
    not_allowed(may("/usr/lib/new/../job"), &lies);
    assert_eq!(limits("", "").1.check_job(Path::new("/anywhere"), Use::New), Ok(()));
}

#[test]
fn links_do_not_lead_out_of_a_root() {
    let base = std::env::temp_dir().join(format!("belay-roots-{}", std::process::id()));
    let (inside, outside) = (base.join("inside"), base.join("outside"));
    for d in [&base, &inside, &outside] {
        std::fs::create_dir(d).unwrap();
    }
    let link = |name: &str, to: &Path| std::os::unix::fs::symlink(to, inside.join(name)).unwrap();
    link("out", &outside);
    link("home", &inside);
    link("nowhere", &outside.join("new"));
    // The root may be a link itself.
    std::os::unix::fs::symlink(&inside, base.join("root")).unwrap();
    let (_, l) = limits(&format!("[checkpoints]\nroots = [\"{}/root\"]", base.display()), "");
    let may = |dir: &str| l.check_job(&base.join(dir), Use::New);
    for dir in ["inside/job", "root/new/job", "inside/home/job"] {
        may(dir).unwrap();
    }
    not_allowed(may("inside/out/job"), &["which is", "outside/job"]);
    not_allowed(may("root/out"), &["outside"]);
    for dir in ["inside/nowhere", "inside/nowhere/job"] {
        not_allowed(may(dir), &[dir, "of which nobody can tell", "line 2, roots", "--ckpt-dir"]);
    }
    std::fs::remove_dir_all(base).unwrap();
}

#[test]
fn tiers_lie_there_too_or_where_the_site_itself_has_put_them() {
    let site =
        format!("{SITES}[[tier]]\nname = \"ssd\"\nkind = \"local\"\npath = \"/var/ssd\"\n[redundancy]\nlocal = \"/var/disk\"");
    let (mut c, l) = limits(&site, "[redundancy]\nscheme = \"xor\"");
    let next = |what| match what {
        Use::New => ["in the configuration", "name another one with --local-dir"],
        Use::Old => ["restart with --config FILE", "have that file allow it"],
        Use::Anew | Use::Lost => ["in the configuration", "have that file allow it"],
    };
    let uses = [Use::New, Use::Old, Use::Anew, Use::Lost];
    l.check_tiers(&c, Use::New).unwrap();
    c.redundancy.local = Some("/var/mine".into());
    for what in uses {
        not_allowed(
            l.check_tiers(&c, what),
            &["local directory /var/mine", "line 4, roots", next(what)[1]],
        );
    }
    c.redundancy.local = Some("/usr/mine".into());
    l.check_tiers(&c, Use::New).unwrap();
    for (path, may) in [("/usr/x", true), ("/var/ssd", true), ("/var/ssd/x", false), ("/var/x", false)] {
        for kind in ["local", "pfs"] {
            let own = format!("[[tier]]\nname = \"mine\"\nkind = \"{kind}\"\npath = \"{path}\"");
            let (c, l) = limits(&site, &own);
            for what in uses {
                match may {
                    true => l.check_tiers(&c, what).unwrap(),
                    false => not_allowed(l.check_tiers(&c, what), &["tier mine:", path, next(what)[0]]),
                }
            }
        }
    }
    // An object store lies in no directory.
    let (c, l) = limits(SITES, "[[tier]]\nname = \"cloud\"\nkind = \"object\"\nurl = \"s3://b\"");
    l.check_tiers(&c, Use::New).unwrap();
}

#[test]
fn errors_name_line_and_key() {
    for (text, words) in [
        ("keep = 0", ["line 2", "keep", "at least 1"]),
        ("max_bytes = 0", ["line 2", "max_bytes", "leave the key out"]),
        ("roots = []", ["line 2", "roots", "at least one"]),
        ("roots = [\"scratch\"]", ["line 2", "roots", "absolute"]),
        ("root = \"/x\"", ["line 2", "root", "`keep`, `max_bytes`, `roots`"]),
    ] {
        let text = format!("[checkpoints]\n{text}");
        let lay = |l: &mut Limits| Config::default().lay(l, Path::new(SITE), &text);
        let f = lay(&mut Limits::default()).unwrap_err();
        assert_eq!(f.exit, Exit::Usage);
        for w in words {
            assert!(f.message.contains(w), "{f} does not mention {w}");
        }
    }
}
