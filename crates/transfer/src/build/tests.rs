//! Builds from archives and directories into a filesystem in memory.

mod containers;
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
struct Site {
    dir: TempDir,
    model: Model,
}

impl Site {
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
        build(&self.model, &inputs, options, process(), &Printed, None)
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
    let site = Site::new();
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
    let site = Site::new();
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
    let site = Site::new();
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
    let site = Site::new();
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
    let site = Site::new();
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
    let site = Site::new();
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
    let site = Site::new();
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
    let again = Site::new();
    let sources = vec![(BuildSource::Archive(path), "")];
    again.build_with(&BuildOptions::new(AT), sources).expect("a build");
    let compare = offshoot_testkit::compare::Compare::of_copies();
    compare.run_filesystems(&again.model, &site.model).assert_same(7);
}

#[test]
fn a_directory_of_the_host() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let site = Site::new();
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
    assert_eq!((measured.entries, measured.directories, measured.data_bytes), (6, 3, 2));
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
        let site = Site::new();
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
