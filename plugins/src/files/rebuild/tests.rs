use super::*;

/// A file that the job has open for writing, without contents in the checkpoint.
fn written(path: &Path) -> FileObject {
    let stat = fd::stat(path, false).unwrap();
    FileObject {
        ids: vec![belay_image::model::ObjectId {
            dev: stat.st_dev,
            ino: stat.st_ino,
        }],
        path: path.into(),
        origin: Origin::Named,
        mode: stat.st_mode & 0o7777,
        owner: (stat.st_uid, stat.st_gid),
        links: stat.st_nlink,
        bytes: u64::try_from(stat.st_size).unwrap(),
        mtime_ns: fd::mtime_ns(&stat),
        atime_ns: None,
        written: true,
        content: None,
        print: None,
        parents: Vec::new(),
        closed: false,
    }
}

#[test]
fn what_another_user_may_have_put_in_the_place_of_an_open_file_is_not_written() {
    let dir = std::env::temp_dir().join(format!("belay-replaced-{}", std::process::id()));
    let (shared, path, victim) = (dir.join("shared"), dir.join("shared/out"), dir.join("out"));
    std::fs::create_dir_all(&shared).unwrap();
    std::fs::write(&path, "job's").unwrap();
    std::fs::write(&victim, "the user's other file").unwrap();
    let object = written(&path);
    let mode = |mode| std::fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    let restarted = || -> Result<(), Fault> {
        let built = prepare(
            &object,
            None,
            (check_named(&object)?, &Sights::default()),
            (&crate::testing::Kept::default(), &|_| None),
        )?;
        let file = built.open_seen(libc::O_WRONLY | libc::O_APPEND)?;
        fd::write_at(file.as_raw_fd(), b", more", 0).at("write")
    };
    let holds = |path: &Path| std::fs::read_to_string(path).unwrap();
    mode(0o777);
    for _ in 0..2 {
        restarted().unwrap();
        assert_eq!(
            holds(&path),
            "job's, more",
            "the same file is cut back, whoever may write beside it"
        );
    }
    let refused = |what: &str, part: &str| {
        let why = restarted().unwrap_err().to_string();
        assert!(why.contains(part), "{what}: {why}");
        assert_eq!(holds(&victim), "the user's other file", "{what}");
    };
    std::fs::rename(&path, shared.join("away")).unwrap();
    std::os::unix::fs::symlink(&victim, &path).unwrap();
    refused("a link", "not a regular file");
    std::fs::remove_file(&path).unwrap();
    std::fs::hard_link(&victim, &path).unwrap();
    refused("another file's second name", "more names");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "other file").unwrap();
    refused("another file", "others can have put it");
    mode(0o755);
    restarted().unwrap();
    assert_eq!(
        holds(&path),
        "other, more",
        "what only the user can have put there may be written"
    );
    std::fs::rename(&shared, dir.join("moved")).unwrap();
    std::os::unix::fs::symlink(&dir, &shared).unwrap();
    if owner::me() == 0 {
        std::os::unix::fs::lchown(&shared, Some(4242), Some(4242)).unwrap();
        refused("a link on the way", "another user's");
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn what_is_exchanged_during_the_restart_is_not_written() {
    let dir = std::env::temp_dir().join(format!("belay-exchanged-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let (path, other) = (dir.join("out"), dir.join("other"));
    std::fs::write(&path, "job's").unwrap();
    std::fs::write(&other, "the user's other file").unwrap();
    let object = written(&path);
    let sight = check_named(&object).unwrap();
    std::fs::rename(&path, dir.join("away")).unwrap();
    for plant in [std::os::unix::fs::symlink::<&Path, &Path>, std::fs::hard_link] {
        plant(&other, &path).unwrap();
        let why = prepare(
            &object,
            None,
            (sight, &Sights::default()),
            (&crate::testing::Kept::default(), &|_| None),
        )
        .map(drop);
        let why = why.unwrap_err().to_string();
        assert!(why.contains("another file has taken its place"), "{why}");
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "the user's other file");
        std::fs::remove_file(&path).unwrap();
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn no_other_file_gets_the_mode_of_one_that_may_not_be_opened() {
    let dir = std::env::temp_dir().join(format!("belay-protected-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let (path, away, other) = (dir.join("out"), dir.join("away"), dir.join("other"));
    for path in [&path, &other] {
        std::fs::write(path, "x").unwrap();
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    }
    let built = BuiltFile {
        mode: 0o444,
        ..BuiltFile::named(&written(&path), None)
    };
    let found = fd::open(&path, libc::O_PATH, 0).unwrap();
    std::fs::rename(&path, &away).unwrap();
    std::os::unix::fs::symlink(&other, &path).unwrap();
    drop(built.open_protected(&path, libc::O_RDWR, found.as_raw_fd()));
    let mode = |path: &Path| fd::stat(path, true).unwrap().st_mode & 0o777;
    assert_eq!((mode(&away), mode(&other)), (0o444, 0o400));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_name_that_is_known_beforehand_is_never_opened() {
    let dir = std::env::temp_dir().join(format!("belay-beside-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let path = dir.join("data");
    let name = beside(&path);
    // A file that somebody holds open, or has linked to another, must not become the job's.
    std::fs::write(&name, b"old").unwrap();
    let held = std::fs::File::open(&name).unwrap();
    let above = fd::above(&path).unwrap();
    let (file, made) = file_beside(&above, &path).unwrap();
    fd::write_at(file.as_raw_fd(), b"secret", 0).unwrap();
    assert_eq!(made, name);
    assert_eq!(held.metadata().unwrap().len(), 3);
    // A link is replaced, not followed.
    std::fs::remove_file(&name).unwrap();
    std::fs::write(dir.join("victim"), b"victim").unwrap();
    std::os::unix::fs::symlink(dir.join("victim"), &name).unwrap();
    file_beside(&above, &path).unwrap();
    assert_eq!(std::fs::read(dir.join("victim")).unwrap(), b"victim");
    if rustix::process::geteuid().as_raw() == 0 {
        std::os::unix::fs::lchown(&name, Some(65534), Some(65534)).unwrap();
        let refused = file_beside(&above, &path).unwrap_err().to_string();
        assert!(refused.contains("another user"), "{refused}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
