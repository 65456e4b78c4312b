//! Builds from archives and directories into a filesystem in memory.

mod containers;
mod manifests;
mod random;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use offshoot_testkit::model::Model;
use offshoot_vfs::path::{LastLink, resolve};
use offshoot_vfs::{FileId, FileSystem, FileType};
use tempfile::TempDir;

use super::tar::tests::{ended, member, plain, records, set};
use super::*;
use crate::extract::tests::{Printed, process};

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 0 };

/// A volume in memory, and files that it is built from.
struct BuildSite {
    dir: TempDir,
    model: Model,
}

impl BuildSite {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        Self { dir, model: Model::made_at(AT) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn archive(&self, members: &[Vec<u8>]) -> BuildSource {
        let count = std::fs::read_dir(self.dir.path()).expect("a directory").count();
        let path = self.path(&format!("{count}.tar"));
        std::fs::write(&path, ended(members.concat())).expect("an archive");
        BuildSource::Archive(path)
    }

    fn build_with(
        &self,
        options: &BuildOptions,
        sources: Vec<(BuildSource, &str)>,
    ) -> Result<ExtractOutcome> {
        let inputs: Vec<_> = sources
            .into_iter()
            .map(|(source, to)| BuildInput { source, to: to.as_bytes().to_vec() })
            .collect();
        let target = BuildTarget { fs: &self.model, snapshots: None };
        let built = build(&target, &inputs, options, process(), &Printed, None);
        built.map(|outcome| outcome.written)
    }

    fn build(&self, members: &[Vec<u8>]) -> Result<ExtractOutcome> {
        self.build_with(&BuildOptions::new(AT), vec![(self.archive(members), "")])
    }

    #[track_caller]
    fn builds(&self, members: &[Vec<u8>]) {
        self.build(members).unwrap_or_else(|failure| panic!("{failure}"));
    }

    #[track_caller]
    fn refuses(&self, members: &[Vec<u8>], said: &str) {
        let failure = self.build(members).expect_err("it is refused").to_string();
        assert!(failure.contains(said), "{failure}, not {said}");
    }

    /// A line for each file, sorted.
    fn shown(&self) -> String {
        let mut lines = Vec::new();
        self.show(self.model.root(), "", &mut lines);
        lines.sort();
        lines.concat()
    }

    fn show(&self, dir: FileId, path: &str, lines: &mut Vec<String>) {
        let fs = &self.model;
        let mut entries = Vec::new();
        fs.read_dir(dir, 0, &mut |entry| {
            entries.push((String::from_utf8_lossy(entry.name).into_owned(), entry.file));
            ControlFlow::Continue(())
        })
        .expect("a directory");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        for (name, file) in entries {
            let path = format!("{path}{name}");
            let attr = fs.attr(file).expect("its attributes");
            lines.push(match attr.file_type {
                FileType::Regular => {
                    let mut data = vec![0; usize::try_from(attr.size).expect("a small file")];
                    fs.read(file, 0, &mut data).expect("its data");
                    format!("{path} x{} {}\n", attr.nlink, text(&data))
                }
                FileType::Symlink => {
                    format!("{path} -> {}\n", text(&fs.read_link(file).expect("a target")))
                }
                FileType::Directory => format!("{path} /\n"),
                other => format!("{path} {other:?}\n"),
            });
            if attr.file_type == FileType::Directory {
                self.show(file, &format!("{path}/"), lines);
            }
        }
    }

    fn attr(&self, path: &str) -> offshoot_vfs::Attr {
        let file = resolve(&self.model, path.as_bytes(), LastLink::Keep).expect("it is there");
        self.model.attr(file).expect("its attributes")
    }
}

fn directory(name: &str, mtime: u64) -> Vec<u8> {
    member(name, b'5', b"", |block| set(block, 136, format!("{mtime:011o}\0").as_bytes()))
}

fn linked(name: &str, entry_type: u8, target: &str) -> Vec<u8> {
    member(name, entry_type, b"", |block| set(block, 157, target.as_bytes()))
}

fn file(name: &str, data: &str) -> Vec<u8> {
    plain(name, b'0', data.as_bytes())
}

#[test]
fn the_later_of_two_entries_counts() {
    let site = BuildSite::new();
    site.builds(&[
        file("a", "first"),
        directory("b/", 1),
        file("b/c/d", "deep"),
        file("a", "second"),
        file("b", "no directory any more"),
        file("e", "e"),
        directory("e", 2),
        linked("f", b'2', "a"),
        file("f", "no link any more"),
        directory("g/", 1),
        file("g/h", "stays"),
        directory("g/", 3),
    ]);
    let expected = "a x1 second\nb x1 no directory any more\ne /\nf x1 no link any more\ng /\n\
                    g/h x1 stays\n";
    assert_eq!(site.shown(), expected);
    assert_eq!(site.attr("/g").mtime.secs, 3);
}

#[test]
fn paths_lead_through_links_inside_the_volume() {
    let site = BuildSite::new();
    site.builds(&[
        linked("bin", b'2', "usr/bin"),
        linked("abs", b'2', "/usr/bin"),
        linked("up", b'2', "../../../usr/../usr/bin"),
        file("usr/bin/sh", "sh"),
        file("bin/ls", "ls"),
        file("abs/cat", "cat"),
        file("up/rm", "rm"),
        linked("hard", b'1', "bin/ls"),
    ]);
    let expected = "abs -> /usr/bin\nbin -> usr/bin\nhard x2 ls\nup -> ../../../usr/../usr/bin\n\
                    usr /\nusr/bin /\nusr/bin/cat x1 cat\nusr/bin/ls x2 ls\nusr/bin/rm x1 rm\n\
                    usr/bin/sh x1 sh\n";
    assert_eq!(site.shown(), expected);
    site.refuses(&[linked("loop", b'2', "loop"), file("loop/a", "")], "/loop");
    site.refuses(&[file("f", ""), file("f/a", "")], "not a directory");
}

/// What `/` and `..` mean in a link ends at the place that is built into.
#[test]
fn links_do_not_lead_out_of_the_place() {
    let site = BuildSite::new();
    let base = site.archive(&[file("etc/passwd", "root")]);
    let hostile = site.archive(&[
        linked("abs", b'2', "/etc"),
        linked("up", b'2', "../../etc"),
        file("abs/passwd", "hostile"),
        file("up/shadow", "hostile"),
    ]);
    let sources = vec![(base, "/"), (hostile, "/srv/box/")];
    site.build_with(&BuildOptions::new(AT), sources).expect("a build");
    let expected = "etc /\netc/passwd x1 root\nsrv /\nsrv/box /\nsrv/box/abs -> /etc\n\
                    srv/box/etc /\nsrv/box/etc/passwd x1 hostile\nsrv/box/etc/shadow x1 hostile\n\
                    srv/box/up -> ../../etc\n";
    assert_eq!(site.shown(), expected);
}

#[test]
fn hard_links_wait_for_their_files() {
    let site = BuildSite::new();
    site.builds(&[
        linked("a", b'1', "b"),
        linked("b", b'1', "dir/c"),
        linked("gone", b'1', "never"),
        file("gone", "came itself"),
        file("dir/c", "data"),
        linked("dir/c", b'1', "dir/c"),
        linked("d", b'1', "a"),
    ]);
    let expected = "a x4 data\nb x4 data\nd x4 data\ndir /\ndir/c x4 data\ngone x1 came itself\n";
    assert_eq!(site.shown(), expected);
    site.refuses(&[linked("x", b'1', "missing")], "a hard link to missing, which is not there");
    site.refuses(&[directory("y/", 1), linked("x", b'1', "y")], "hard link to a directory");
}

#[test]
fn directories_keep_their_times_whatever_comes_later() {
    let site = BuildSite::new();
    site.builds(&[
        directory("./", 7),
        directory("a/", 1),
        directory("a/b/", 2),
        file("a/b/f", ""),
        directory("c/", 3),
        file("a/b/g", ""),
        file("c/h", ""),
        linked("c/i", b'1', "a/b/f"),
        file("a/late", ""),
    ]);
    let mtime = |path| site.attr(path).mtime.secs;
    assert_eq!(["/", "/a", "/a/b", "/c"].map(mtime), [7, 1, 2, 3]);
}

#[test]
fn options_change_owners_and_times_and_leave_out() {
    let site = BuildSite::new();
    let mut options = BuildOptions::new(AT);
    options.owner = Some((5, 6));
    options.latest = Some(Timestamp { secs: 4, nanos: 0 });
    options.exclude(b"*.o");
    options.exclude(b"/src/cache");
    let source = site.archive(&[
        directory("src/", 9),
        file("src/a.c", "c"),
        file("src/a.o", "o"),
        directory("src/cache/", 1),
        file("src/cache/deep/x", "x"),
        file("other/cache/y", "y"),
    ]);
    site.build_with(&options, vec![(source, "")]).expect("a build");
    let expected = "other /\nother/cache /\nother/cache/y x1 y\nsrc /\nsrc/a.c x1 c\n";
    assert_eq!(site.shown(), expected);
    let attr = site.attr("/src/a.c");
    assert_eq!((attr.uid, attr.gid, attr.mtime.secs, attr.atime.secs), (5, 6, 4, 4));
    let attr = site.attr("/src");
    assert_eq!((attr.uid, attr.mtime.secs), (5, 4));
}

/// The archive that an extraction writes is the way back.
#[test]
fn what_an_extraction_archives_is_built_as_it_was() {
    use crate::extract::{ExtractSource, extract_tar};
    let site = BuildSite::new();
    let long = format!("{}/{}", "d".repeat(200), "n".repeat(200));
    site.builds(&[
        records(b'x', &[("path", &long), ("mtime", "-1.5"), ("SCHILY.xattr.user.a%3Db", "v")]),
        file("cut", "long"),
        records(
            b'x',
            &[("SCHILY.acl.access", "user::rw-,user:7:r--,group::r--,mask::r--,other::---")],
        ),
        file("acl", "listed"),
        linked("link", b'1', "acl"),
        linked("soft", b'2', "nowhere"),
        plain("fifo", b'6', b""),
    ]);
    let path = site.path("out.tar");
    let source = ExtractSource { fs: &site.model, top: site.model.root(), path: b"" };
    let archive = std::fs::File::create(&path).expect("a file");
    extract_tar(&source, archive, &Printed).expect("an archive");
    let again = BuildSite::new();
    let sources = vec![(BuildSource::Archive(path), "")];
    again.build_with(&BuildOptions::new(AT), sources).expect("a build");
    let compare = offshoot_testkit::compare::Compare::of_copies();
    compare.run_filesystems(&again.model, &site.model).assert_same(7);
}

#[test]
fn a_directory_of_the_host() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let site = BuildSite::new();
    let top = site.path("top");
    std::fs::create_dir_all(top.join("z/y")).expect("directories");
    std::fs::write(top.join("z/y/f"), "f").expect("a file");
    std::fs::write(top.join("b.o"), "o").expect("a file");
    std::fs::hard_link(top.join("z/y/f"), top.join("a")).expect("a link");
    symlink("z/y", top.join("s")).expect("a link");
    std::fs::set_permissions(top.join("a"), std::fs::Permissions::from_mode(0o4711))
        .expect("a mode");
    std::fs::write(top.join("image"), "the image").expect("a file");
    let mut options = BuildOptions::new(AT);
    options.exclude(b"*.o");
    options.images.extend(crate::host::host_id_of_file(&top.join("image")));
    let source = || BuildSource::named(top.as_os_str());
    let measured = measure_sources(
        &[BuildInput { source: source(), to: Vec::new() }],
        &options,
        process(),
        &Printed,
    );
    let measured = measured.expect("a size");
    assert_eq!((measured.entries, measured.directories, measured.data_bytes), (6, 3, 1));
    let outcome = site.build_with(&options, vec![(source(), "/to")]).expect("a build");
    // The place that it is built to is made first.
    assert_eq!((outcome.files, outcome.directories, outcome.bytes), (3, 4, 1));
    let expected = "to /\nto/a x2 f\nto/s -> z/y\nto/z /\nto/z/y /\nto/z/y/f x2 f\n";
    assert_eq!(site.shown(), expected);
    assert_eq!(site.attr("/to/z/y/f").permissions, 0o4711);
    let missing = BuildSource::named(Path::new("/nowhere/at/all").as_os_str());
    site.build_with(&options, vec![(missing, "")]).expect_err("there is none");
}

/// Archives that are packed, told by their first bytes.
#[test]
fn packed_archives() {
    use std::io::Write;
    let archive = ended(file("a", &"packed ".repeat(500)));
    let gzip = || {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(&archive).expect("memory");
        out.finish().expect("memory")
    };
    let bzip2 = || {
        let mut out = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
        out.write_all(&archive).expect("memory");
        out.finish().expect("memory")
    };
    let xz = || {
        let options = lzma_rust2::XzOptions::with_preset(1);
        let mut out = lzma_rust2::XzWriter::new(Vec::new(), options).expect("a writer");
        out.write_all(&archive).expect("memory");
        out.finish().expect("memory")
    };
    let zstd = || zstd::encode_all(&archive[..], 1).expect("memory");
    for (name, bytes) in [("gzip", gzip()), ("bzip2", bzip2()), ("xz", xz()), ("zstd", zstd())] {
        let site = BuildSite::new();
        let path = site.path("packed");
        let build = |bytes: &[u8]| {
            std::fs::write(&path, bytes).expect("a file");
            let source = BuildSource::Archive(path.clone());
            site.build_with(&BuildOptions::new(AT), vec![(source, "")])
        };
        build(&bytes).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        assert_eq!(site.attr("/a").size, 3500, "{name}");
        build(&bytes[..bytes.len() - 3]).expect_err(name);
    }
}

/// Each link of the chain comes before the one that it leads to, and directories on the way come
/// with links alone.
#[test]
fn a_long_chain_of_waiting_links_takes_no_square_of_its_length() {
    const LENGTH: usize = 20_000;
    let site = BuildSite::new();
    let name = |number: usize| format!("d{number:05}/f");
    let link = |number| linked(&name(number), b'1', &name(number + 1));
    let mut members: Vec<_> = (0..LENGTH).map(link).collect();
    members.push(linked("here", b'2', "."));
    members.push(linked("z", b'1', &format!("here/{}", name(0))));
    members.push(file(&name(LENGTH), "the end"));
    let begin = std::time::Instant::now();
    site.builds(&members);
    assert!(begin.elapsed().as_secs() < 60, "{:?}", begin.elapsed());
    assert_eq!(site.attr("/z").nlink, u32::try_from(LENGTH + 2).expect("a small number"));
}

#[test]
fn what_replaces_a_directory_ends_the_links_that_wait_in_it() {
    let site = BuildSite::new();
    site.builds(&[linked("d/a", b'1', "later"), file("d", "a file"), file("later", "later")]);
    assert_eq!(site.shown(), "d x1 a file\nlater x1 later\n");
}

#[test]
fn what_cannot_be_applied_is_counted() {
    let site = BuildSite::new();
    let mut options = BuildOptions::new(AT);
    options.xattr_bytes_max = Some(1000);
    let source = site.archive(&[
        records(b'x', &[("SCHILY.xattr.user.a", &"v".repeat(994))]),
        file("fits", ""),
        records(b'x', &[("SCHILY.xattr.user.a", &"v".repeat(995))]),
        file("too-large", ""),
        records(
            b'x',
            &[("SCHILY.acl.access", "user::rw-,user:lisa:r--,group::r--,mask::r--,other::---")],
        ),
        file("named", ""),
    ]);
    let outcome = site.build_with(&options, vec![(source, "")]).expect("a build");
    let counted: Vec<_> = outcome
        .not_applied
        .iter()
        .map(|refusal| (refusal.kind, refusal.count, &refusal.first[..]))
        .collect();
    assert_eq!(counted, [("xattr", 1, "too-large"), ("text_list", 1, "named")]);
    let value = |path: &str| {
        let file = resolve(&site.model, path.as_bytes(), LastLink::Keep).expect("it is there");
        crate::xattrs::held_xattrs(&site.model, file).expect("attributes").len()
    };
    assert_eq!((value("/fits"), value("/too-large")), (1, 0));
}

/// The watcher of a user who presses Ctrl-C after so many questions.
struct Impatient(std::sync::atomic::AtomicU32);

impl Watcher for Impatient {
    fn words(&self, _: crate::Hint) -> &'static str {
        ""
    }

    fn error(&self, _: &dyn std::fmt::Display) {}

    fn detail(&self, _: &dyn std::fmt::Display) {}

    fn warning(&self, _: &dyn std::fmt::Display) {}

    fn note(&self, _: &dyn std::fmt::Display) {}

    fn is_interrupted(&self) -> bool {
        let left = &self.0;
        let update = left.fetch_update(
            std::sync::atomic::Ordering::Relaxed,
            std::sync::atomic::Ordering::Relaxed,
            |left| left.checked_sub(1),
        );
        update.is_err()
    }

    fn start_progress(&self, verb: &'static str) -> Box<dyn crate::TransferProgress> {
        Printed.start_progress(verb)
    }

    fn stop_progress(&self) {}
}

/// Wherever a build is when the user interrupts it, it says that, and nothing else.
#[test]
fn a_build_is_interrupted_everywhere() {
    let host = BuildSite::new();
    let packed = |members: &[Vec<u8>]| {
        let mut archive = ended(members.concat());
        // What is behind the mark at the end is read, too.
        archive.resize(8 << 20, 0);
        let path = host.path("packed.zst");
        std::fs::write(&path, zstd::encode_all(&archive[..], 1).expect("memory")).expect("a file");
        BuildSource::Archive(path)
    };
    let large = "x".repeat(3 << 20);
    let source = packed(&[linked("a", b'1', "b"), file("b", &large), file("excluded", &large)]);
    let mut options = BuildOptions::new(AT);
    options.exclude(b"excluded");
    let (mut interrupted, mut ended) = (0, false);
    for questions in [0, 1, 2, 3, 5, 8, 13, 20, 50, 100, 200, 300, 500, 100_000] {
        let watcher = || Impatient(std::sync::atomic::AtomicU32::new(questions));
        let input = || [BuildInput { source: source.clone(), to: Vec::new() }];
        let site = BuildSite::new();
        let target = BuildTarget { fs: &site.model, snapshots: None };
        for done in [
            measure_sources(&input(), &options, process(), &watcher()).map(|_| ()),
            build(&target, &input(), &options, process(), &watcher(), None).map(|_| ()),
        ] {
            match done {
                Ok(()) => ended = true,
                Err(TransferFailure::Interrupted) => interrupted += 1,
                Err(failure) => panic!("{questions}: {failure}"),
            }
        }
    }
    assert!(ended && interrupted >= 16, "{interrupted}");
}

/// A pipe may give its bytes one by one.
#[test]
fn a_stream_is_told_by_bytes_that_come_one_by_one_and_must_end() {
    use std::io::Write;
    let archive = ended(file("a", "packed"));
    let packed = zstd::encode_all(&archive[..], 1).expect("memory");
    let site = BuildSite::new();
    let fifo = site.path("fifo");
    let status = std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo starts");
    assert!(status.success());
    let through = |bytes: &[u8]| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut pipe = std::fs::OpenOptions::new().write(true).open(&fifo).expect("a pipe");
                for byte in bytes.iter().take(8) {
                    pipe.write_all(&[*byte]).expect("a reader");
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                pipe.write_all(bytes.get(8..).unwrap_or_default()).expect("a reader");
            });
            let source = BuildSource::Archive(fifo.clone());
            site.build_with(&BuildOptions::new(AT), vec![(source, "")])
        })
    };
    through(&packed).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!(site.shown(), "a x1 packed\n");
    let said = through(&archive[..1024]).expect_err("it is cut off").to_string();
    assert!(said.contains("no mark at its end: it was cut off"), "{said}");
}

/// All names of a file are one file.
#[test]
fn a_file_with_several_names_is_measured_once() {
    let site = BuildSite::new();
    let top = site.path("top");
    std::fs::create_dir(&top).expect("a directory");
    std::fs::write(top.join("a"), vec![1; 100_000]).expect("a file");
    for name in ["b", "c"] {
        std::fs::hard_link(top.join("a"), top.join(name)).expect("a link");
    }
    let input = || BuildInput { source: BuildSource::Directory(top.clone()), to: Vec::new() };
    let options = BuildOptions::new(AT);
    let measure = |inputs: &[BuildInput]| {
        measure_sources(inputs, &options, process(), &Printed).expect("a size").data_bytes
    };
    assert_eq!(measure(&[input()]), 100_000);
    // Two sources make two files of it.
    assert_eq!(measure(&[input(), input()]), 200_000);
}

/// What the host has as a hole makes no difference to a build that is reproducible.
#[test]
fn zeros_are_holes_whatever_the_host_says() {
    use std::os::unix::fs::FileExt;
    const SIZE: usize = (3 << 20) + 100;
    let site = BuildSite::new();
    let mut bytes = vec![0; SIZE];
    for at in [5000, (1 << 20) - 1, 1 << 20, (2 << 20) + 8191, SIZE - 1] {
        bytes[at] = 1;
    }
    std::fs::create_dir(site.path("full")).expect("a directory");
    std::fs::create_dir(site.path("sparse")).expect("a directory");
    std::fs::write(site.path("full/f"), &bytes).expect("a file");
    let sparse = std::fs::File::create(site.path("sparse/f")).expect("a file");
    sparse.set_len(SIZE as u64).expect("a length");
    for (at, sector) in bytes.chunks(4096).enumerate() {
        if sector.contains(&1) {
            sparse.write_all_at(sector, at as u64 * 4096).expect("a write");
        }
    }
    let mut options = BuildOptions::new(AT);
    options.finds_zeros = true;
    for name in ["full", "sparse"] {
        let source = || BuildSource::Directory(site.path(name));
        let input = [BuildInput { source: source(), to: Vec::new() }];
        let measured = measure_sources(&input, &options, process(), &Printed).expect("a size");
        assert_eq!(measured.data_bytes, 4 * 4096 + 100, "{name}");
        let built = BuildSite::new();
        let outcome = built.build_with(&options, vec![(source(), "")]).expect("a build");
        assert_eq!(outcome.bytes, 4 * 4096 + 100, "{name}");
        let file = resolve(&built.model, b"/f", LastLink::Keep).expect("it is there");
        let mut data = vec![0; SIZE];
        assert_eq!(built.model.read(file, 0, &mut data).expect("its data"), SIZE);
        assert!(data == bytes, "{name}");
    }
}

#[test]
fn large_directories_are_emptied() {
    let site = BuildSite::new();
    let mut members: Vec<_> = (0..1500).map(|at| file(&format!("d/{at}"), "")).collect();
    members.extend((0..300).map(|at| file(&format!("d/s{at}/{at}"), "")));
    members.push(file("d", "a file"));
    site.builds(&members);
    assert_eq!(site.shown(), "d x1 a file\n");
}
