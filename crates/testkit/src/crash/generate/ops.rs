//! The operations, with what each needs and the points of persistence that may follow it.

use offshoot_vfs::{Fallocate, FileFlags};

use super::tree::Need;
use super::{Op, Step};
use crate::crash::workload::{Share, acl_name, split};

/// The paths of the regular files in the namespace.
const FILES: [&str; 6] = ["foo", "bar", "A/foo", "A/bar", "B/foo", "B/bar"];

/// The files whose data and attributes change.
const CHANGED: [&str; 2] = ["foo", "A/bar"];

/// Lengths of existing files, in bytes: one that most filesystems store inline, and one of several
/// sectors.
const LENGTHS: [usize; 2] = [100, 10_000];

/// An operation that may be part of a workload.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) op: Op,
    pub(super) needs: Vec<Need>,
    pub(super) points: Vec<Step>,
}

/// All candidates, in a fixed order, because workloads are known by number.
pub(super) fn ops() -> Vec<Candidate> {
    let mut all = Vec::new();
    names(&mut all);
    links(&mut all);
    renames(&mut all);
    data(&mut all);
    in_place(&mut all);
    copies(&mut all);
    shares(&mut all);
    attributes(&mut all);
    flags(&mut all);
    lists(&mut all);
    subvolumes(&mut all);
    settings(&mut all);
    all
}

/// `fsync` and `fdatasync` of each of `paths`, without repetition, and `sync`.
fn points(paths: &[&str]) -> Vec<Step> {
    let mut points: Vec<Step> = Vec::new();
    for path in paths {
        for point in [Step::Fsync, Step::Fdatasync].map(|point| point((*path).to_owned())) {
            if !points.contains(&point) {
                points.push(point);
            }
        }
    }
    points.push(Step::Sync);
    points
}

fn names(all: &mut Vec<Candidate>) {
    for path in FILES {
        let (dir, own) = (split(path).0, path.to_owned());
        let absent = || vec![Need::Absent(path)];
        let add = |op, needs, points| Candidate { op, needs, points };
        all.push(add(Op::Create(own.clone()), absent(), points(&[path, dir])));
        all.push(add(Op::Unnamed(own.clone()), absent(), points(&[path, dir])));
        all.push(add(Op::Symlink(own.clone()), absent(), points(&[dir])));
        if CHANGED.contains(&path) {
            all.push(add(Op::Fifo(own.clone()), absent(), points(&[dir])));
            all.push(add(Op::Device(own.clone()), absent(), points(&[dir])));
        }
        let file = Need::File(path, LENGTHS[1]);
        all.push(add(Op::Unlink(own.clone()), vec![file.clone()], points(&[dir])));
        let opened = vec![file.clone(), Need::Opened(path)];
        all.push(add(Op::Unlink(own.clone()), opened, points(&[dir])));
        // The file has a second name, so it stays.
        let other = if path == "foo" { "A/foo" } else { "foo" };
        let linked = vec![together(path, other), file, Need::Linked(path, other)];
        all.push(add(Op::Unlink(own), linked, points(&[other, dir])));
    }
    for path in ["A", "B", "A/C", "B/C"] {
        let dir = split(path).0;
        all.push(Candidate {
            op: Op::Mkdir(path.to_owned()),
            needs: vec![Need::Absent(path)],
            points: points(&[path, dir]),
        });
        all.push(Candidate {
            op: Op::Rmdir(path.to_owned()),
            needs: vec![Need::EmptyDir(path)],
            points: points(&[dir]),
        });
    }
}

/// All pairs of two different files.
fn pairs() -> impl Iterator<Item = (&'static str, &'static str)> {
    let others = |old| FILES.into_iter().filter(move |new| *new != old).map(move |new| (old, new));
    FILES.into_iter().flat_map(others)
}

/// Needs the directories of both to be in one subvolume, so that a file can have a name in each.
fn together(one: &'static str, other: &'static str) -> Need {
    Need::Together(split(one).0, split(other).0)
}

fn links(all: &mut Vec<Candidate>) {
    for (old, new) in pairs() {
        all.push(Candidate {
            op: Op::Link(old.to_owned(), new.to_owned()),
            needs: vec![together(old, new), Need::File(old, LENGTHS[0]), Need::Absent(new)],
            points: points(&[old, split(new).0]),
        });
    }
}

fn renames(all: &mut Vec<Candidate>) {
    let rename = |from, to, needs: Vec<Need>| {
        let dirs = [split(from).0, split(to).0];
        let op = Op::Rename(from.to_owned(), to.to_owned());
        let needs = [vec![together(from, to)], needs].concat();
        Candidate { op, needs, points: points(&[to, dirs[0], dirs[1]]) }
    };
    for (from, to) in pairs() {
        let file = Need::File(from, LENGTHS[1]);
        all.push(rename(from, to, vec![file.clone(), Need::Absent(to)]));
        all.push(rename(from, to, vec![file, Need::File(to, LENGTHS[0])]));
    }
    let noreplace = |from, to, need| {
        let Candidate { needs, points, .. } = rename(from, to, vec![need, Need::Absent(to)]);
        let op = Op::RenameNoReplace(from.to_owned(), to.to_owned());
        Candidate { op, needs, points }
    };
    for (from, to) in [("foo", "bar"), ("foo", "A/bar"), ("B/foo", "A/bar")] {
        all.push(noreplace(from, to, Need::File(from, LENGTHS[1])));
    }
    all.push(noreplace("A", "B", Need::Dir("A")));
    // The replaced file has another name, and that name is synced.
    for (from, to, other) in [
        ("foo", "bar", "A/foo"),
        ("foo", "A/bar", "bar"),
        ("A/foo", "bar", "foo"),
        ("A/foo", "A/bar", "B/bar"),
        ("B/foo", "A/bar", "B/bar"),
    ] {
        let needs = vec![
            together(to, other),
            Need::File(from, LENGTHS[1]),
            Need::File(to, LENGTHS[0]),
            Need::Linked(to, other),
        ];
        let Candidate { op, needs, .. } = rename(from, to, needs);
        all.push(Candidate { op, needs, points: points(&[other]) });
    }
    let full = || vec![Need::Dir("A"), Need::File("A/foo", LENGTHS[0])];
    let with = |need| [full(), vec![need]].concat();
    all.push(rename("A", "B", with(Need::Absent("B"))));
    // A subvolume stays a subvolume even if it is empty, so the target must be a plain directory.
    let plain = [vec![Need::Together("", "B")], with(Need::EmptyDir("B"))].concat();
    all.push(rename("A", "B", plain));
    all.push(rename("A", "B/C", with(Need::Absent("B/C"))));
    all.push(rename("A/C", "B/C", vec![Need::Dir("A/C"), Need::Absent("B/C")]));
    all.push(rename("A/C", "C", vec![Need::Dir("A/C"), Need::Absent("C")]));
    let exchange = |one, other, needs: Vec<Need>| {
        let dirs = [split(one).0, split(other).0];
        let op = Op::Exchange(one.to_owned(), other.to_owned());
        let needs = [vec![together(one, other)], needs].concat();
        Candidate { op, needs, points: points(&[one, other, dirs[0], dirs[1]]) }
    };
    for (one, other) in [("foo", "bar"), ("foo", "A/bar"), ("B/foo", "A/bar")] {
        let needs = vec![Need::File(one, LENGTHS[0]), Need::File(other, LENGTHS[1])];
        all.push(exchange(one, other, needs));
    }
    all.push(exchange("A", "B", with(Need::Dir("B"))));
    all.push(exchange("A/C", "foo", vec![Need::Dir("A/C"), Need::File("foo", LENGTHS[1])]));
}

fn data(all: &mut Vec<Candidate>) {
    for (path, length) in CHANGED.into_iter().flat_map(|path| LENGTHS.map(|len| (path, len))) {
        let mut add = |op| {
            let needs = vec![Need::File(path, length)];
            all.push(Candidate { op, needs, points: points(&[path]) });
        };
        let end = length as u64;
        for (offset, len) in [
            // Append a few bytes, append several sectors, overwrite everything, overwrite the
            // middle, write across the end, write behind the end.
            (end, 50),
            (end, 20_000),
            (0, length),
            (end / 3, length / 3),
            (end - 10, 5000),
            (end + 9000, 300),
        ] {
            add(Op::Write { path: path.to_owned(), offset, len });
        }
        for (what, offset, len) in [
            // Ranges inside the file, behind its end, and across its end.
            (Fallocate::Allocate { keep_size: false }, 0, 30_000),
            (Fallocate::Allocate { keep_size: true }, end, 20_000),
            (Fallocate::PunchHole, 0, 4096),
            (Fallocate::PunchHole, 50, 6000),
            (Fallocate::Zero { keep_size: false }, 3000, 12_000),
            (Fallocate::Zero { keep_size: true }, 3000, 12_000),
            (Fallocate::Collapse, 0, 4096),
            (Fallocate::Insert, 4096, 4096),
        ] {
            let moves = matches!(what, Fallocate::Collapse | Fallocate::Insert);
            // There is nothing to move in a file that ends before the range does.
            if !moves || end > offset + len {
                add(Op::Fallocate { path: path.to_owned(), what, offset, len });
            }
        }
        // At the beginning, right behind that, and after a gap that becomes a hole.
        for (offset, len) in [(0, 4096), (4096, 16_384), (65_536, 4096)] {
            add(Op::WriteDirect { path: path.to_owned(), offset, len });
        }
        for size in [0, end / 2, end / 4096 * 4096 + 1, end + 10, 65_536] {
            add(Op::Truncate(path.to_owned(), size));
        }
    }
}

/// Files whose data is written in place.
fn in_place(all: &mut Vec<Candidate>) {
    let (path, length) = ("foo", LENGTHS[1]);
    let mut add = |op, needs| all.push(Candidate { op, needs, points: points(&[path]) });
    add(Op::SetFlags(path.to_owned(), FileFlags::NODATACOW), vec![Need::Empty(path)]);
    let own = || path.to_owned();
    let end = length as u64;
    for op in [
        Op::Write { path: own(), offset: 0, len: length },
        Op::Write { path: own(), offset: end / 3, len: length / 3 },
        Op::Write { path: own(), offset: end, len: 20_000 },
        Op::WriteDirect { path: own(), offset: 4096, len: 8192 },
        Op::Truncate(own(), end / 2),
        Op::Fallocate { path: own(), what: Fallocate::PunchHole, offset: 50, len: 6000 },
    ] {
        add(op, vec![Need::InPlace(path, length)]);
    }
}

fn copies(all: &mut Vec<Candidate>) {
    let [one, other] = CHANGED;
    for (from, to) in [(one, other), (other, one)] {
        for lengths in [LENGTHS, [LENGTHS[1], LENGTHS[0]]] {
            all.push(Candidate {
                op: Op::Copy(from.to_owned(), to.to_owned()),
                needs: vec![Need::File(from, lengths[0]), Need::File(to, lengths[1])],
                points: points(&[to, from]),
            });
        }
    }
}

/// Operations that make two files share a range.
fn shares(all: &mut Vec<Candidate>) {
    let [one, other] = CHANGED;
    let share = |from: &str, (offset, len), to: &str, to_offset| Share {
        from: from.to_owned(),
        offset,
        len,
        to: to.to_owned(),
        to_offset,
    };
    let end = LENGTHS[1] as u64;
    for (from, to) in [(one, other), (other, one)] {
        let needs = vec![Need::File(from, LENGTHS[1]), Need::File(to, LENGTHS[1])];
        // The middle to the beginning, a range across the end, and the end of one behind the end of
        // the other.
        for (range, at) in [((4096, 4096), 0), ((0, 8192), 8192), ((8192, end - 8192), 12_288)] {
            let op = Op::Clone(share(from, range, to, at));
            all.push(Candidate { op, needs: needs.clone(), points: points(&[to, from]) });
        }
        let needs = [needs, vec![Need::Same(from, to)]].concat();
        // A part, and the whole file.
        for range in [(0, 4096), (0, end)] {
            let op = Op::Dedupe(share(from, range, to, 0));
            all.push(Candidate { op, needs: needs.clone(), points: points(&[to, from]) });
        }
    }
    let op = Op::Clone(share(one, (0, 4096), one, 8192));
    let needs = vec![Need::File(one, LENGTHS[1])];
    all.push(Candidate { op, needs, points: points(&[one]) });
}

fn attributes(all: &mut Vec<Candidate>) {
    let file = |path| Need::File(path, LENGTHS[0]);
    for (path, need) in [("foo", file("foo")), ("A/bar", file("A/bar")), ("A", Need::Dir("A"))] {
        let mut add = |op, more: Option<Need>| {
            let needs = [Some(need.clone()), more].into_iter().flatten().collect();
            all.push(Candidate { op, needs, points: points(&[path]) });
        };
        let has = || Some(Need::Xattr(path, "user.one"));
        add(Op::SetXattr(path.to_owned(), "user.one".to_owned(), 30), None);
        add(Op::SetXattr(path.to_owned(), "user.one".to_owned(), 3000), has());
        add(Op::SetXattr(path.to_owned(), "user.two".to_owned(), 3), has());
        add(Op::RemoveXattr(path.to_owned(), "user.one".to_owned()), has());
        add(Op::Chmod(path.to_owned(), 0o600), None);
    }
}

/// Sets file flags: ones that forbid nothing and ones that forbid almost all changes. A directory
/// gets only flags that forbid nothing.
fn flags(all: &mut Vec<Candidate>) {
    let mut add = |path: &str, flags, need| {
        let op = Op::SetFlags(path.to_owned(), flags);
        all.push(Candidate { op, needs: vec![need], points: points(&[path]) });
    };
    for path in CHANGED {
        let file = || Need::File(path, LENGTHS[0]);
        add(path, FileFlags::NODUMP | FileFlags::NOATIME, file());
        for flag in [FileFlags::IMMUTABLE, FileFlags::APPEND, FileFlags::SYNC] {
            add(path, flag, file());
        }
    }
    add("A", FileFlags::NODUMP | FileFlags::NOATIME, Need::Dir("A"));
    add("A", FileFlags::DIRSYNC, Need::Dir("A"));
}

/// Access control lists and compression settings.
fn lists(all: &mut Vec<Candidate>) {
    let file = |path| Need::File(path, LENGTHS[1]);
    for (path, need) in [("foo", file("foo")), ("A/bar", file("A/bar")), ("A", Need::Dir("A"))] {
        let own = || path.to_owned();
        let mut add = |op, more: Option<Need>| {
            let needs = [Some(need.clone()), more].into_iter().flatten().collect();
            all.push(Candidate { op, needs, points: points(&[path]) });
        };
        let acl = |is_default| Op::SetAcl { path: own(), is_default, permissions: 0o751 };
        let compression = |how: &str| Op::SetCompression(own(), how.to_owned());
        add(acl(false), None);
        add(Op::Chmod(own(), 0o604), Some(Need::Acl(path)));
        let name = String::from_utf8_lossy(acl_name(false)).into_owned();
        add(Op::RemoveXattr(own(), name), Some(Need::Acl(path)));
        add(compression("zstd"), None);
        add(compression("lzo"), Some(Need::Compression(path)));
        add(compression(""), Some(Need::Compression(path)));
        if path == "A" {
            add(acl(true), None);
        }
    }
    // A file that inherits the compression of its directory.
    let needs = vec![Need::Dir("A"), Need::Compression("A"), Need::Absent("A/foo")];
    let op = Op::Create("A/foo".to_owned());
    all.push(Candidate { op, needs, points: points(&["A/foo", "A"]) });
}

/// Settings of subvolumes. They are not stored inside the subvolume, so only `sync` makes them
/// durable.
fn settings(all: &mut Vec<Candidate>) {
    let a = [Need::Subvolume("A"), Need::File("A/foo", LENGTHS[1])];
    let snapshot = [&a[..], &[Need::NoneBelow("A"), Need::Snapshot("A", "B")]].concat();
    let with = |need| [&a[..], &[need]].concat();
    let own = str::to_owned;
    for (op, needs) in [
        (Op::SetReadOnly(own("A"), true), a.to_vec()),
        (Op::SetReadOnly(own("B"), true), snapshot.clone()),
        (Op::SetReadOnly(own("A"), false), with(Need::ReadOnly("A"))),
        (Op::SetDefault(own("A")), a.to_vec()),
        (Op::SetDefault(own("B")), snapshot),
        (Op::SetDefault(String::new()), with(Need::Default("A"))),
    ] {
        all.push(Candidate { op, needs, points: points(&[]) });
    }
}

/// Subvolumes in place of the directories A and B: operations that make, snapshot, delete, rename
/// and exchange them.
fn subvolumes(all: &mut Vec<Candidate>) {
    let full = |path, [long, short]: [&'static str; 2]| {
        let files = [Need::File(long, LENGTHS[1]), Need::File(short, LENGTHS[0])];
        [vec![Need::Subvolume(path)], files.to_vec()].concat()
    };
    let [a, b] = [full("A", ["A/foo", "A/bar"]), full("B", ["B/foo", "B/bar"])];
    for path in ["A", "B", "A/C"] {
        let (op, needs) = (Op::Subvolume(path.to_owned()), vec![Need::Absent(path)]);
        all.push(Candidate { op, needs, points: points(&[path, split(path).0]) });
    }
    for (needs, source, to, is_read_only) in [
        (&a, "A", "B", false),
        (&b, "B", "A", false),
        (&a, "A", "T", true),
        (&a, "A", "B/T", false),
        (&a, "A", "A/C", false),
    ] {
        let dir = split(to).0;
        let more = [Need::NoneBelow(source), Need::Absent(to)];
        let needs = [&needs[..], &more].concat();
        let op = Op::Snapshot { source: source.to_owned(), to: to.to_owned(), is_read_only };
        all.push(Candidate { op, needs, points: points(&[to, dir]) });
    }
    let opened = [&a[..], &[Need::Opened("A/foo")]].concat();
    let snapshot = [&a[..], &[Need::NoneBelow("A"), Need::Snapshot("A", "B")]].concat();
    for (path, needs) in [("A", a.clone()), ("A", opened), ("A", snapshot.clone()), ("B", snapshot)]
    {
        let needs = [needs, vec![Need::NoneBelow(path), Need::NotDefault(path)]].concat();
        let op = Op::DeleteSubvolume(path.to_owned());
        // No promise covers when its contents are dropped, but a power cut may come in the middle
        // of dropping them.
        let dropped = [Step::Do(Op::DropDeleted)];
        let points = [&points(&[split(path).0])[..], &dropped].concat();
        all.push(Candidate { op, needs, points });
    }
    // The path of a subvolume is not stored inside it, so an `fsync` of the subvolume does not
    // promise its path.
    let with = |need| [&a[..], &[need]].concat();
    let plain = [Need::Together("", "B"), Need::EmptyDir("B")];
    for (to, needs) in [
        ("B", with(Need::Absent("B"))),
        ("B", [&plain[..], &a].concat()),
        ("B/C", with(Need::Absent("B/C"))),
    ] {
        let op = Op::Rename("A".to_owned(), to.to_owned());
        all.push(Candidate { op, needs, points: points(&[split(to).0, ""]) });
    }
    let apart = [Need::Together("", "B"), Need::Dir("B/C")];
    for (other, needs) in [
        ("B", [&a[..], &b].concat()),
        ("B", with(Need::Dir("B"))),
        ("B/C", [&apart[..], &a].concat()),
        ("foo", with(Need::File("foo", LENGTHS[1]))),
    ] {
        let op = Op::Exchange("A".to_owned(), other.to_owned());
        all.push(Candidate { op, needs, points: points(&[split(other).0, ""]) });
    }
}
