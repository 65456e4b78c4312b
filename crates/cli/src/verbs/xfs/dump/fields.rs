//! The fields of structures, by their names in the book.

use offshoot_xfs_format::group::{Agf, Agi};
use offshoot_xfs_format::inode::{XfsFork, XfsInode, XfsInodeCore};
use offshoot_xfs_format::superblock::XfsSuperblockFields;
use offshoot_xfs_format::{AgBlock, U32};
use zerocopy::FromBytes;

use crate::verbs::fields::{Fields, Value};

/// The number that stands for no inode.
const NONE: u32 = u32::MAX;

/// Adds the numbers in these fields of a structure.
macro_rules! numbers {
    ($fields:expr, $of:expr; $($name:ident)+) => {
        $fields$(.with(stringify!($name), $of.$name))+
    };
}

/// The fields of the superblock that `bytes` begin with, verified or not.
pub(super) fn superblock(bytes: &[u8]) -> Option<Fields> {
    let (of, _) = XfsSuperblockFields::ref_from_prefix(bytes).ok()?;
    let fields = Fields::default().name("magicnum", &of.magicnum);
    let fields = numbers!(fields, of; blocksize dblocks rblocks rextents).uuid("uuid", of.uuid);
    let fields = numbers!(
        fields, of;
        logstart rootino rbmino rsumino rextsize agblocks agcount rbmblocks logblocks versionnum
        sectsize inodesize inopblock
    );
    let fields = fields.name("fname", of.label());
    let fields = numbers!(
        fields, of;
        blocklog sectlog inodelog inopblog agblklog rextslog inprogress imax_pct icount ifree
        fdblocks frextents uquotino gquotino qflags flags shared_vn inoalignmt unit width
        dirblklog logsectlog logsectsize logsunit features2 bad_features2 compat ro_compat incompat
        log_incompat spino_align pquotino lsn
    );
    let fields = fields.uuid("meta_uuid", of.meta_uuid);
    let fields = numbers!(fields, of; metadirino rgcount rgextents rgblklog rtstart rtreserved);
    let names: Vec<&str> = of.feature_names().collect();
    Some(fields.with("features", names))
}

fn list(numbers: &[U32]) -> Value {
    numbers.to_vec().into()
}

pub(super) fn agf(of: &Agf) -> Fields {
    let fields = Fields::default().name("magicnum", &of.magicnum);
    let fields = numbers!(fields, of; versionnum seqno length);
    let fields = fields.with("roots", list(&of.roots)).with("levels", list(&of.levels));
    let fields = numbers!(fields, of; flfirst fllast flcount freeblks longest btreeblks)
        .uuid("uuid", of.uuid);
    numbers!(fields, of; rmap_blocks refcount_blocks refcount_root refcount_level lsn)
}

pub(super) fn agi(of: &Agi) -> Fields {
    let fields = Fields::default().name("magicnum", &of.magicnum);
    let fields =
        numbers!(fields, of; versionnum seqno length count root level freecount newino dirino);
    // A list that is empty is left out.
    let unlinked = of.unlinked.iter().zip(0_u32..).filter(|(first, _)| first.get() != NONE);
    let unlinked = unlinked
        .map(|(first, number)| Fields::default().with("list", number).with("first", *first));
    let fields = fields.with("unlinked", unlinked.collect::<Vec<_>>()).uuid("uuid", of.uuid);
    numbers!(fields, of; lsn free_root free_level iblocks fblocks)
}

/// The blocks of the free list that are in use.
pub(super) fn agfl(blocks: &[AgBlock]) -> Fields {
    Fields::default().with("blocks", blocks.iter().map(|block| block.0).collect::<Vec<_>>())
}

/// The core of the inode that `bytes` begin with, verified or not.
pub(super) fn core(bytes: &[u8]) -> Option<Fields> {
    let (of, _) = XfsInodeCore::ref_from_prefix(bytes).ok()?;
    let fields = Fields::default().name("magic", &of.magic);
    let fields = numbers!(
        fields, of;
        mode version format onlink uid gid nlink projid_lo projid_hi big_nextents atime mtime ctime
        size nblocks extsize nextents anextents forkoff aformat flags generation next_unlinked
    );
    if of.version < 3 {
        return Some(fields);
    }
    let fields = numbers!(fields, of; changecount lsn flags2 cowextsize crtime ino);
    Some(fields.uuid("uuid", of.uuid))
}

/// An inode with what its forks hold.
pub(super) fn inode(bytes: &[u8], inode: &XfsInode<'_>) -> Option<Fields> {
    let fields = core(bytes)?.with("data", fork(&inode.data));
    Some(match &inode.attributes {
        Some(attributes) => fields.with("attributes", fork(attributes)),
        None => fields,
    })
}

fn fork(fork: &XfsFork<'_>) -> Fields {
    let fields = Fields::default();
    match fork {
        XfsFork::Device(number) => fields.with("device", *number),
        XfsFork::Local(bytes) => fields.name("local", bytes),
        XfsFork::MetaBtree(bytes) => fields.name("metadata_root", bytes),
        XfsFork::Extents(extents) => {
            let extents = extents.iter().map(|item| {
                let extent = item.get();
                Fields::default()
                    .with("offset", extent.offset.0)
                    .with("start", extent.start.0)
                    .with("count", extent.count)
                    .with("unwritten", u8::from(extent.is_unwritten))
            });
            fields.with("extents", extents.collect::<Vec<_>>())
        }
        XfsFork::Btree(root) => {
            let children = root.children.iter();
            let children = children.map(|(offset, block)| {
                Fields::default().with("offset", offset.0).with("block", block.0)
            });
            fields.with("level", root.level).with("children", children.collect::<Vec<_>>())
        }
    }
}
