//! A volume at rest: what it refuses then, and how much is free.
//!
//! Nothing is reserved or promised any more, all free space has been looked at, and everything is
//! committed. In this state the volume refuses an operation only where less is free than its worst
//! case, beside what it keeps for commits and removals. It refuses data only where there is also no
//! chunk to allocate. What it keeps is no more than `docs/space.md` says.

use std::ops::ControlFlow;
use std::time::Duration;

use offshoot_btrfs::{Filesystem, KindStats, SpaceKind};
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{EntryPlace, Errno, FileId, FileSystemMut, Result};

use crate::MIB;
use crate::worker::{AT, NEW};

/// More than the worst case of an operation on nine items, in bytes, with nodes of 16 KiB and trees
/// of three levels.
const OPERATION_BYTES: u64 = 2 << 20;

/// The most that the volume keeps where the trees of a commit are small, and how much it keeps for
/// each byte of these trees.
const KEPT_BYTES: u64 = 5 << 20;
const KEPT_FACTOR: u64 = 3;

/// The trees that a commit copies.
const COMMIT_TREES: [TreeId; 4] =
    [TreeId::EXTENT, TreeId::CSUM, TreeId::FREE_SPACE, TreeId::BLOCK_GROUP];

/// The target of a link that fills much of a leaf.
const TARGET: [u8; 3000] = [b'x'; 3000];

/// The size of one write, in bytes.
const PIECE: usize = 64 << 10;

/// How many bytes of a kind are free, and not reserved, promised or kept.
pub(crate) fn room(kind: &KindStats) -> u64 {
    let spoken = kind.reserved_bytes + kind.promised_bytes;
    let kept = kind.commit_bytes + kind.kept_bytes;
    (kind.free_bytes + kind.next_chunk_bytes).saturating_sub(spoken + kept)
}

fn kind(fs: &Filesystem, is_wanted: impl Fn(SpaceKind) -> bool) -> KindStats {
    let kinds = fs.volume().space_stats().kinds;
    kinds.into_iter().find(|one| is_wanted(one.kind)).expect("every volume has it")
}

pub(crate) fn metadata(fs: &Filesystem) -> KindStats {
    kind(fs, |kind| matches!(kind, SpaceKind::Metadata | SpaceKind::Mixed))
}

pub(crate) fn data(fs: &Filesystem) -> KindStats {
    kind(fs, |kind| matches!(kind, SpaceKind::Data | SpaceKind::Mixed))
}

/// How many bytes the trees take that a commit copies.
fn commit_trees(fs: &Filesystem) -> u64 {
    let (volume, mut bytes) = (fs.volume(), 0);
    volume
        .for_each_item(volume.root_tree(), Key::MIN, |key, data| {
            let is_root = key.item_type == ItemType::ROOT_ITEM;
            if is_root && COMMIT_TREES.contains(&TreeId(key.objectid)) {
                bytes += RootItem::parse(data).expect("it was verified").bytes_used.get();
            }
            ControlFlow::Continue(())
        })
        .expect("the root tree reads");
    bytes
}

/// Requires that no member has room for a chunk, of data or of metadata: two stripes of a MiB, and
/// the space before the first chunk.
pub(crate) fn assert_no_chunk_is_left(fs: &Filesystem) {
    let allocated = |chunk: Chunk| chunk.stripes.len() as u64 * chunk.stripe_bytes();
    let left = (MIB << 20) - fs.volume().chunks().map(allocated).sum::<u64>();
    assert!(left < 3 << 20, "{left} bytes belong to no chunk");
}

/// Requires that less is free than an operation may need, and that no more is kept than should be.
/// The caller has committed everything.
fn assert_hardly_any(left: &KindStats, trees: u64) {
    assert!(room(left) < OPERATION_BYTES && left.unknown_bytes == 0, "refused with {left:#?}");
    let kept = left.commit_bytes + left.kept_bytes;
    let most = KEPT_BYTES + KEPT_FACTOR * trees;
    assert!(kept <= most, "{kept} bytes are kept, and not {most}");
}

/// How many times `work` was done until the volume refused it for want of space.
fn until_refused(what: &str, work: impl Fn(u64) -> Result<()>) -> u64 {
    let refused = |number: &u64| match work(*number) {
        Ok(()) => false,
        Err(error) if error.errno() == Errno::NOSPC => true,
        Err(error) => panic!("{what}: {error}"),
    };
    (0..1 << 20).find(refused).expect("the volume has an end")
}

/// Requires that nothing is reserved or promised.
pub(crate) fn assert_at_rest(fs: &Filesystem) {
    const MOST_TRIES: u32 = 100;
    let spoken = || {
        let kinds = fs.volume().space_stats().kinds;
        kinds.iter().map(|kind| kind.reserved_bytes + kind.promised_bytes).sum::<u64>()
    };
    // The thread of the volume may still be at work.
    let tries = (0..MOST_TRIES).take_while(|_| spoken() > 0);
    tries.for_each(|_| std::thread::sleep(Duration::from_millis(50)));
    assert_eq!(spoken(), 0, "{:?}", fs.volume().space_stats());
}

/// Requires that the volume refuses operations and writes in the directory `dir` only where there
/// is no room, and that their results can be removed.
pub(crate) fn assert_refused_rightly(fs: &Filesystem, dir: FileId) {
    let name = |what: &str, number| format!("{what}-{number}");
    let links = until_refused("a link", |number| {
        let name = name("link", number);
        fs.symlink(EntryPlace { dir, name: name.as_bytes() }, &TARGET, &NEW).map(drop)
    });
    fs.sync().expect("a commit");
    assert_hardly_any(&metadata(fs), commit_trees(fs));
    assert_no_chunk_is_left(fs);

    // A removal makes room for the metadata of a file's data.
    for number in 0..links {
        let name = name("link", number);
        fs.unlink(EntryPlace { dir, name: name.as_bytes() }, AT).expect("it is there");
    }
    fs.sync().expect("a commit");
    let file = match fs.create(EntryPlace { dir, name: b"file" }, &NEW) {
        Ok(file) => file,
        Err(error) if error.errno() == Errno::NOSPC => return,
        Err(error) => panic!("a file: {error}"),
    };
    let piece = vec![7; PIECE];
    until_refused("a write", |number| {
        fs.write(file, number * PIECE as u64, &piece, AT)?;
        fs.fsync(file)
    });
    fs.sync().expect("a commit");
    let (data, metadata) = (data(fs), metadata(fs));
    let has_data = data.free_bytes >= data.reserved_bytes + PIECE as u64;
    assert!(
        room(&metadata) < OPERATION_BYTES || !has_data && data.unknown_bytes == 0,
        "refused with {data:#?} and {metadata:#?}"
    );
    assert_no_chunk_is_left(fs);
    fs.unlink(EntryPlace { dir, name: b"file" }, AT).expect("it is there");
    fs.sync().expect("a commit");
}
