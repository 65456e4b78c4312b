//! Every accepted write can be stored, even when it makes the trees grow much more than its own
//! size.
//!
//! Links fill leaves around each of many files, so that each file is alone in two leaves. A write
//! of a few bytes to it then copies a whole block. Example: 2000 bytes in each of 1300 files take
//! 1300 leaves of 16 KiB.

use offshoot_btrfs::{EngineOptions, Filesystem, SubvolumeId};
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut};

use crate::open;
use crate::quiet::{assert_no_chunk_is_left, data, metadata};
use crate::shapes::{device, is_accepted, name};
use crate::worker::{AT, NEW};

const FILES: u64 = 1300;

/// The links that fill the rest of two leaves of 16 KiB, and the target of each link. Two leaves,
/// because the tree may move items from a full leaf to the one beside it.
const LINKS: u64 = 25;
const TARGET: [u8; 1000] = [b'x'; 1000];

/// The target of links that fill metadata.
const LARGE_TARGET: [u8; 3000] = [b'x'; 3000];

/// A volume that does nothing by the clock.
fn quiet() -> Option<Filesystem> {
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    Some(open(&device(&["-m", "single"])?, &options))
}

/// Makes the files.
fn scattered(fs: &Filesystem) -> Vec<FileId> {
    let make = |number| {
        let [own, links] = [name(number), format!("link-{number}")];
        let file = fs.create(EntryPlace { dir: fs.root(), name: own.as_bytes() }, &NEW);
        for link in 0..LINKS {
            let name = format!("{links}-{link}");
            let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
            fs.symlink(place, &TARGET, &NEW).expect("there is room");
        }
        file.expect("there is room")
    };
    let files = (0..FILES).map(make).collect();
    fs.sync().expect("a commit");
    files
}

/// Makes links in a directory of their own until one is refused. Returns the directory, and how
/// many links there are.
fn fill_metadata(fs: &Filesystem) -> (FileId, u64) {
    let dir = fs.mkdir(EntryPlace { dir: fs.root(), name: b"large links" }, &NEW);
    let dir = dir.expect("there is room");
    let link = |number: &u64| {
        let name = name(*number);
        is_accepted(fs.symlink(EntryPlace { dir, name: name.as_bytes() }, &LARGE_TARGET, &NEW))
    };
    let links = (0..1 << 20).find(|number| !link(number)).expect("the volume has an end");
    assert_no_chunk_is_left(fs);
    (dir, links)
}

/// A volume where all space is allocated to chunks, and metadata has room for `free_links` more
/// large links. Returns the files too.
fn nearly_full(free_links: u64) -> Option<(Filesystem, Vec<FileId>)> {
    let fs = quiet()?;
    let files = scattered(&fs);
    let (dir, links) = fill_metadata(&fs);
    fs.sync().expect("a commit");
    for number in links - free_links..links {
        let name = name(number);
        fs.unlink(EntryPlace { dir, name: name.as_bytes() }, AT).expect("it is there");
    }
    fs.sync().expect("a commit");
    Some((fs, files))
}

/// Writes `len` bytes to each of `files` until a write is refused. Requires that all of it can be
/// stored, and that a file can be removed then.
fn assert_can_be_stored(fs: &Filesystem, files: &[FileId], len: usize) {
    let bytes = vec![7; len];
    let written =
        files.iter().take_while(|&&file| is_accepted(fs.write(file, 0, &bytes, AT))).count();
    println!("{written} of {FILES} files were written: {:?}", metadata(fs));
    assert!(data(fs).free_bytes > 1 << 20, "there is room for data");
    fs.sync().expect("there is room for what was accepted");
    fs.unlink(EntryPlace { dir: fs.root(), name: name(0).as_bytes() }, AT).expect("it is there");
    fs.sync().expect("a commit");
}

/// Regression: we counted the old blocks that write-back copies as free again after a commit, but
/// the snapshot keeps them.
#[test]
fn what_is_written_beside_a_snapshot_can_be_stored() {
    let Some((fs, files)) = nearly_full(5200) else { return };
    let place = EntryPlace { dir: fs.root(), name: b"snapshot" };
    fs.snapshot(SubvolumeId::FS, place, true, AT).expect("there is room");
    assert_can_be_stored(&fs, &files, 4096);
}

/// Regression: a refused snapshot left more reserved than there was, and no file could be removed
/// any more.
#[test]
fn files_can_be_removed_when_a_snapshot_was_refused() {
    let Some(fs) = quiet() else { return };
    let (dir, links) = fill_metadata(&fs);
    fs.sync().expect("a commit");
    let place = EntryPlace { dir: fs.root(), name: b"snapshot" };
    assert!(!is_accepted(fs.snapshot(SubvolumeId::FS, place, true, AT)), "the volume is full");
    for number in 0..links {
        let name = name(number);
        fs.unlink(EntryPlace { dir, name: name.as_bytes() }, AT).expect("it is there");
    }
    fs.snapshot(SubvolumeId::FS, place, true, AT).expect("there is room");
    fs.sync().expect("a commit");
}

/// Regression: we reserved inline data by its bytes, although each file took a leaf.
#[test]
fn small_files_in_full_leaves_can_be_stored() {
    let Some((fs, files)) = nearly_full(3200) else { return };
    assert_can_be_stored(&fs, &files, 2000);
}
