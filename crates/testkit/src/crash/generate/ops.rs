//! The operations, with what each needs and the points of persistence that may follow it.

use offshoot_vfs::{Fallocate, FileFlags};

use super::tree::OpNeed;
use super::{WorkloadOp, WorkloadStep};
use crate::crash::workload::{SharedRange, acl_name, split};

/// The paths of the regular files in the namespace.
const FILES: [&str; 6] = ["foo", "bar", "A/foo", "A/bar", "B/foo", "B/bar"];

/// The files whose data and attributes change.
const CHANGED: [&str; 2] = ["foo", "A/bar"];

/// Lengths of existing files, in bytes: one that most filesystems store inline, and one of several
/// sectors.
const LENGTHS: [usize; 2] = [100, 10_000];

/// An operation that may be part of a workload.
#[derive(Debug)]
pub(super) struct CandidateOp {
    pub(super) op: WorkloadOp,
    pub(super) needs: Vec<OpNeed>,
    pub(super) points: Vec<WorkloadStep>,
}

/// All candidates, in a fixed order, because workloads are known by number.
pub(super) fn ops() -> Vec<CandidateOp> {
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
fn points(paths: &[&str]) -> Vec<WorkloadStep> {
    let mut points: Vec<WorkloadStep> = Vec::new();
    for path in paths {
        for point in
            [WorkloadStep::Fsync, WorkloadStep::Fdatasync].map(|point| point((*path).to_owned()))
        {
            if !points.contains(&point) {
                points.push(point);
            }
        }
    }
    points.push(WorkloadStep::Sync);
    points
}

fn names(all: &mut Vec<CandidateOp>) {
    for path in FILES {
        let (dir, own) = (split(path).0, path.to_owned());
        let absent = || vec![OpNeed::Absent(path)];
        let add = |op, needs, points| CandidateOp { op, needs, points };
        all.push(add(WorkloadOp::Create(own.clone()), absent(), points(&[path, dir])));
        all.push(add(WorkloadOp::Unnamed(own.clone()), absent(), points(&[path, dir])));
        all.push(add(WorkloadOp::Symlink(own.clone()), absent(), points(&[dir])));
        if CHANGED.contains(&path) {
            all.push(add(WorkloadOp::Fifo(own.clone()), absent(), points(&[dir])));
            all.push(add(WorkloadOp::Device(own.clone()), absent(), points(&[dir])));
        }
        let file = OpNeed::File(path, LENGTHS[1]);
        all.push(add(WorkloadOp::Unlink(own.clone()), vec![file.clone()], points(&[dir])));
        let opened = vec![file.clone(), OpNeed::Opened(path)];
        all.push(add(WorkloadOp::Unlink(own.clone()), opened, points(&[dir])));
        // The file has a second name, so it stays.
        let other = if path == "foo" { "A/foo" } else { "foo" };
        let linked = vec![together(path, other), file, OpNeed::Linked(path, other)];
        all.push(add(WorkloadOp::Unlink(own), linked, points(&[other, dir])));
    }
    for path in ["A", "B", "A/C", "B/C"] {
        let dir = split(path).0;
        all.push(CandidateOp {
            op: WorkloadOp::Mkdir(path.to_owned()),
            needs: vec![OpNeed::Absent(path)],
            points: points(&[path, dir]),
        });
        all.push(CandidateOp {
            op: WorkloadOp::Rmdir(path.to_owned()),
            needs: vec![OpNeed::EmptyDir(path)],
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
fn together(one: &'static str, other: &'static str) -> OpNeed {
    OpNeed::Together(split(one).0, split(other).0)
}

fn links(all: &mut Vec<CandidateOp>) {
    for (old, new) in pairs() {
        all.push(CandidateOp {
            op: WorkloadOp::Link(old.to_owned(), new.to_owned()),
            needs: vec![together(old, new), OpNeed::File(old, LENGTHS[0]), OpNeed::Absent(new)],
            points: points(&[old, split(new).0]),
        });
    }
}

fn renames(all: &mut Vec<CandidateOp>) {
    let rename = |from, to, needs: Vec<OpNeed>| {
        let dirs = [split(from).0, split(to).0];
        let op = WorkloadOp::Rename(from.to_owned(), to.to_owned());
        let needs = [vec![together(from, to)], needs].concat();
        CandidateOp { op, needs, points: points(&[to, dirs[0], dirs[1]]) }
    };
    for (from, to) in pairs() {
        let file = OpNeed::File(from, LENGTHS[1]);
        all.push(rename(from, to, vec![file.clone(), OpNeed::Absent(to)]));
        all.push(rename(from, to, vec![file, OpNeed::File(to, LENGTHS[0])]));
    }
    let noreplace = |from, to, need| {
        let CandidateOp { needs, points, .. } = rename(from, to, vec![need, OpNeed::Absent(to)]);
        let op = WorkloadOp::RenameNoReplace(from.to_owned(), to.to_owned());
        CandidateOp { op, needs, points }
    };
    for (from, to) in [("foo", "bar"), ("foo", "A/bar"), ("B/foo", "A/bar")] {
        all.push(noreplace(from, to, OpNeed::File(from, LENGTHS[1])));
    }
    all.push(noreplace("A", "B", OpNeed::Dir("A")));
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
            OpNeed::File(from, LENGTHS[1]),
            OpNeed::File(to, LENGTHS[0]),
            OpNeed::Linked(to, other),
        ];
        let CandidateOp { op, needs, .. } = rename(from, to, needs);
        all.push(CandidateOp { op, needs, points: points(&[other]) });
    }
    let full = || vec![OpNeed::Dir("A"), OpNeed::File("A/foo", LENGTHS[0])];
    let with = |need| [full(), vec![need]].concat();
    all.push(rename("A", "B", with(OpNeed::Absent("B"))));
    // A subvolume stays a subvolume even if it is empty, so the target must be a plain directory.
    let plain = [vec![OpNeed::Together("", "B")], with(OpNeed::EmptyDir("B"))].concat();
    all.push(rename("A", "B", plain));
    all.push(rename("A", "B/C", with(OpNeed::Absent("B/C"))));
    all.push(rename("A/C", "B/C", vec![OpNeed::Dir("A/C"), OpNeed::Absent("B/C")]));
    all.push(rename("A/C", "C", vec![OpNeed::Dir("A/C"), OpNeed::Absent("C")]));
    let exchange = |one, other, needs: Vec<OpNeed>| {
        let dirs = [split(one).0, split(other).0];
        let op = WorkloadOp::Exchange(one.to_owned(), other.to_owned());
        let needs = [vec![together(one, other)], needs].concat();
        CandidateOp { op, needs, points: points(&[one, other, dirs[0], dirs[1]]) }
    };
    for (one, other) in [("foo", "bar"), ("foo", "A/bar"), ("B/foo", "A/bar")] {
        let needs = vec![OpNeed::File(one, LENGTHS[0]), OpNeed::File(other, LENGTHS[1])];
        all.push(exchange(one, other, needs));
    }
    all.push(exchange("A", "B", with(OpNeed::Dir("B"))));
    all.push(exchange("A/C", "foo", vec![OpNeed::Dir("A/C"), OpNeed::File("foo", LENGTHS[1])]));
}

fn data(all: &mut Vec<CandidateOp>) {
    for (path, length) in CHANGED.into_iter().flat_map(|path| LENGTHS.map(|len| (path, len))) {
        let mut add = |op| {
            let needs = vec![OpNeed::File(path, length)];
            all.push(CandidateOp { op, needs, points: points(&[path]) });
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
            add(WorkloadOp::Write { path: path.to_owned(), offset, len });
        }
        for (what, offset, len) in [
            // Ranges inside the file, behind its end, and across its end.
            (Fallocate::Allocate { keeps_size: false }, 0, 30_000),
            (Fallocate::Allocate { keeps_size: true }, end, 20_000),
            (Fallocate::PunchHole, 0, 4096),
            (Fallocate::PunchHole, 50, 6000),
            (Fallocate::Zero { keeps_size: false }, 3000, 12_000),
            (Fallocate::Zero { keeps_size: true }, 3000, 12_000),
            (Fallocate::Collapse, 0, 4096),
            (Fallocate::Insert, 4096, 4096),
        ] {
            let moves = matches!(what, Fallocate::Collapse | Fallocate::Insert);
            // There is nothing to move in a file that ends before the range does.
            if !moves || end > offset + len {
                add(WorkloadOp::Fallocate { path: path.to_owned(), what, offset, len });
            }
        }
        // At the beginning, right behind that, and after a gap that becomes a hole.
        for (offset, len) in [(0, 4096), (4096, 16_384), (65_536, 4096)] {
            add(WorkloadOp::WriteDirect { path: path.to_owned(), offset, len });
        }
        for size in [0, end / 2, end / 4096 * 4096 + 1, end + 10, 65_536] {
            add(WorkloadOp::Truncate(path.to_owned(), size));
        }
    }
}

/// Files whose data is written in place.
fn in_place(all: &mut Vec<CandidateOp>) {
    let (path, length) = ("foo", LENGTHS[1]);
    let mut add = |op, needs| all.push(CandidateOp { op, needs, points: points(&[path]) });
    add(WorkloadOp::SetFlags(path.to_owned(), FileFlags::NODATACOW), vec![OpNeed::Empty(path)]);
    let own = || path.to_owned();
    let end = length as u64;
    for op in [
        WorkloadOp::Write { path: own(), offset: 0, len: length },
        WorkloadOp::Write { path: own(), offset: end / 3, len: length / 3 },
        WorkloadOp::Write { path: own(), offset: end, len: 20_000 },
        WorkloadOp::WriteDirect { path: own(), offset: 4096, len: 8192 },
        WorkloadOp::Truncate(own(), end / 2),
        WorkloadOp::Fallocate { path: own(), what: Fallocate::PunchHole, offset: 50, len: 6000 },
    ] {
        add(op, vec![OpNeed::InPlace(path, length)]);
    }
}

fn copies(all: &mut Vec<CandidateOp>) {
    let [one, other] = CHANGED;
    for (from, to) in [(one, other), (other, one)] {
        for lengths in [LENGTHS, [LENGTHS[1], LENGTHS[0]]] {
            all.push(CandidateOp {
                op: WorkloadOp::Copy(from.to_owned(), to.to_owned()),
                needs: vec![OpNeed::File(from, lengths[0]), OpNeed::File(to, lengths[1])],
                points: points(&[to, from]),
            });
        }
    }
}

/// Operations that make two files share a range.
fn shares(all: &mut Vec<CandidateOp>) {
    let [one, other] = CHANGED;
    let share = |from: &str, (offset, len), to: &str, to_offset| SharedRange {
        from: from.to_owned(),
        offset,
        len,
        to: to.to_owned(),
        to_offset,
    };
    let end = LENGTHS[1] as u64;
    for (from, to) in [(one, other), (other, one)] {
        let needs = vec![OpNeed::File(from, LENGTHS[1]), OpNeed::File(to, LENGTHS[1])];
        // The middle to the beginning, a range across the end, and the end of one behind the end of
        // the other.
        for (range, at) in [((4096, 4096), 0), ((0, 8192), 8192), ((8192, end - 8192), 12_288)] {
            let op = WorkloadOp::Clone(share(from, range, to, at));
            all.push(CandidateOp { op, needs: needs.clone(), points: points(&[to, from]) });
        }
        let needs = [needs, vec![OpNeed::Same(from, to)]].concat();
        // A part, and the whole file.
        for range in [(0, 4096), (0, end)] {
            let op = WorkloadOp::Dedupe(share(from, range, to, 0));
            all.push(CandidateOp { op, needs: needs.clone(), points: points(&[to, from]) });
        }
    }
    let op = WorkloadOp::Clone(share(one, (0, 4096), one, 8192));
    let needs = vec![OpNeed::File(one, LENGTHS[1])];
    all.push(CandidateOp { op, needs, points: points(&[one]) });
}

fn attributes(all: &mut Vec<CandidateOp>) {
    let file = |path| OpNeed::File(path, LENGTHS[0]);
    for (path, need) in [("foo", file("foo")), ("A/bar", file("A/bar")), ("A", OpNeed::Dir("A"))] {
        let mut add = |op, more: Option<OpNeed>| {
            let needs = [Some(need.clone()), more].into_iter().flatten().collect();
            all.push(CandidateOp { op, needs, points: points(&[path]) });
        };
        let has = || Some(OpNeed::Xattr(path, "user.one"));
        add(WorkloadOp::SetXattr(path.to_owned(), "user.one".to_owned(), 30), None);
        add(WorkloadOp::SetXattr(path.to_owned(), "user.one".to_owned(), 3000), has());
        add(WorkloadOp::SetXattr(path.to_owned(), "user.two".to_owned(), 3), has());
        add(WorkloadOp::RemoveXattr(path.to_owned(), "user.one".to_owned()), has());
        add(WorkloadOp::Chmod(path.to_owned(), 0o600), None);
    }
}

/// Sets file flags: ones that forbid nothing and ones that forbid almost all changes. A directory
/// gets only flags that forbid nothing.
fn flags(all: &mut Vec<CandidateOp>) {
    let mut add = |path: &str, flags, need| {
        let op = WorkloadOp::SetFlags(path.to_owned(), flags);
        all.push(CandidateOp { op, needs: vec![need], points: points(&[path]) });
    };
    for path in CHANGED {
        let file = || OpNeed::File(path, LENGTHS[0]);
        add(path, FileFlags::NODUMP | FileFlags::NOATIME, file());
        for flag in [FileFlags::IMMUTABLE, FileFlags::APPEND, FileFlags::SYNC] {
            add(path, flag, file());
        }
    }
    add("A", FileFlags::NODUMP | FileFlags::NOATIME, OpNeed::Dir("A"));
    add("A", FileFlags::DIRSYNC, OpNeed::Dir("A"));
}

/// Access control lists and compression settings.
fn lists(all: &mut Vec<CandidateOp>) {
    let file = |path| OpNeed::File(path, LENGTHS[1]);
    for (path, need) in [("foo", file("foo")), ("A/bar", file("A/bar")), ("A", OpNeed::Dir("A"))] {
        let own = || path.to_owned();
        let mut add = |op, more: Option<OpNeed>| {
            let needs = [Some(need.clone()), more].into_iter().flatten().collect();
            all.push(CandidateOp { op, needs, points: points(&[path]) });
        };
        let acl = |is_default| WorkloadOp::SetAcl { path: own(), is_default, permissions: 0o751 };
        let compression = |how: &str| WorkloadOp::SetCompression(own(), how.to_owned());
        add(acl(false), None);
        add(WorkloadOp::Chmod(own(), 0o604), Some(OpNeed::Acl(path)));
        let name = String::from_utf8_lossy(acl_name(false)).into_owned();
        add(WorkloadOp::RemoveXattr(own(), name), Some(OpNeed::Acl(path)));
        add(compression("zstd"), None);
        add(compression("lzo"), Some(OpNeed::Compression(path)));
        add(compression(""), Some(OpNeed::Compression(path)));
        if path == "A" {
            add(acl(true), None);
        }
    }
    // A file that inherits the compression of its directory.
    let needs = vec![OpNeed::Dir("A"), OpNeed::Compression("A"), OpNeed::Absent("A/foo")];
    let op = WorkloadOp::Create("A/foo".to_owned());
    all.push(CandidateOp { op, needs, points: points(&["A/foo", "A"]) });
}

/// Settings of subvolumes. They are not stored inside the subvolume, so only `sync` makes them
/// durable.
fn settings(all: &mut Vec<CandidateOp>) {
    let a = [OpNeed::Subvolume("A"), OpNeed::File("A/foo", LENGTHS[1])];
    let snapshot = [&a[..], &[OpNeed::NoneBelow("A"), OpNeed::Snapshot("A", "B")]].concat();
    let with = |need| [&a[..], &[need]].concat();
    let own = str::to_owned;
    for (op, needs) in [
        (WorkloadOp::SetReadOnly(own("A"), true), a.to_vec()),
        (WorkloadOp::SetReadOnly(own("B"), true), snapshot.clone()),
        (WorkloadOp::SetReadOnly(own("A"), false), with(OpNeed::ReadOnly("A"))),
        (WorkloadOp::SetDefault(own("A")), a.to_vec()),
        (WorkloadOp::SetDefault(own("B")), snapshot),
        (WorkloadOp::SetDefault(String::new()), with(OpNeed::Default("A"))),
    ] {
        all.push(CandidateOp { op, needs, points: points(&[]) });
    }
}

/// Subvolumes in place of the directories A and B: operations that make, snapshot, delete, rename
/// and exchange them.
fn subvolumes(all: &mut Vec<CandidateOp>) {
    let full = |path, [long, short]: [&'static str; 2]| {
        let files = [OpNeed::File(long, LENGTHS[1]), OpNeed::File(short, LENGTHS[0])];
        [vec![OpNeed::Subvolume(path)], files.to_vec()].concat()
    };
    let [a, b] = [full("A", ["A/foo", "A/bar"]), full("B", ["B/foo", "B/bar"])];
    for path in ["A", "B", "A/C"] {
        let (op, needs) = (WorkloadOp::Subvolume(path.to_owned()), vec![OpNeed::Absent(path)]);
        all.push(CandidateOp { op, needs, points: points(&[path, split(path).0]) });
    }
    for (needs, source, to, is_read_only) in [
        (&a, "A", "B", false),
        (&b, "B", "A", false),
        (&a, "A", "T", true),
        (&a, "A", "B/T", false),
        (&a, "A", "A/C", false),
    ] {
        let dir = split(to).0;
        let more = [OpNeed::NoneBelow(source), OpNeed::Absent(to)];
        let needs = [&needs[..], &more].concat();
        let op =
            WorkloadOp::Snapshot { source: source.to_owned(), to: to.to_owned(), is_read_only };
        all.push(CandidateOp { op, needs, points: points(&[to, dir]) });
    }
    let opened = [&a[..], &[OpNeed::Opened("A/foo")]].concat();
    let snapshot = [&a[..], &[OpNeed::NoneBelow("A"), OpNeed::Snapshot("A", "B")]].concat();
    for (path, needs) in [("A", a.clone()), ("A", opened), ("A", snapshot.clone()), ("B", snapshot)]
    {
        let needs = [needs, vec![OpNeed::NoneBelow(path), OpNeed::NotDefault(path)]].concat();
        let op = WorkloadOp::DeleteSubvolume(path.to_owned());
        // No promise covers when its contents are dropped, but a power cut may come in the middle
        // of dropping them.
        let dropped = [WorkloadStep::Do(WorkloadOp::DropDeleted)];
        let points = [&points(&[split(path).0])[..], &dropped].concat();
        all.push(CandidateOp { op, needs, points });
    }
    // The path of a subvolume is not stored inside it, so an `fsync` of the subvolume does not
    // promise its path.
    let with = |need| [&a[..], &[need]].concat();
    let plain = [OpNeed::Together("", "B"), OpNeed::EmptyDir("B")];
    for (to, needs) in [
        ("B", with(OpNeed::Absent("B"))),
        ("B", [&plain[..], &a].concat()),
        ("B/C", with(OpNeed::Absent("B/C"))),
    ] {
        let op = WorkloadOp::Rename("A".to_owned(), to.to_owned());
        all.push(CandidateOp { op, needs, points: points(&[split(to).0, ""]) });
    }
    let apart = [OpNeed::Together("", "B"), OpNeed::Dir("B/C")];
    for (other, needs) in [
        ("B", [&a[..], &b].concat()),
        ("B", with(OpNeed::Dir("B"))),
        ("B/C", [&apart[..], &a].concat()),
        ("foo", with(OpNeed::File("foo", LENGTHS[1]))),
    ] {
        let op = WorkloadOp::Exchange("A".to_owned(), other.to_owned());
        all.push(CandidateOp { op, needs, points: points(&[split(other).0, ""]) });
    }
}
