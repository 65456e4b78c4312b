//! Everything in volumes that the kernel and `mkfs.xfs` made, compared with what they say.
//!
//! Each test walks all trees of all groups and all inodes of a volume with several levels of trees,
//! counts what it finds, and builds every block again.

mod volume;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use offshoot_machine::run::run;
use offshoot_xfs_format::btree::{
    XfsBtreeBlock, XfsBtreeBuilder, XfsForkRoot, XfsSearchKey, XfsTree, seal,
};
use offshoot_xfs_format::features::{XfsHindrance, XfsObstacleKind, XfsRoCompat};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agf, Agfl, Agi};
use offshoot_xfs_format::inode::{XfsFork, XfsInode, device_number};
use offshoot_xfs_format::record::{
    XfsExtentItem, XfsFreeExtent, XfsInodeChunk, XfsReverseMap, XfsSharedExtent,
};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, FsBlock, Ino, XfsGeometry};

/// A directory that goes when the test ends.
struct ScratchDir(PathBuf);

impl ScratchDir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("xfs-format-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What the walk of a volume found.
#[derive(Default)]
struct Census {
    blocks: BTreeMap<(String, u16), usize>,
    free: u64,
    inodes: u64,
    free_inodes: u64,
    shared: u64,
    sparse: u64,
    owned: u64,
    files: BTreeMap<u64, String>,
}

struct VolumeImage {
    file: File,
    superblock: XfsSuperblock,
}

impl VolumeImage {
    fn open(path: &Path) -> Self {
        let file = File::open(path).expect("the image");
        let superblock = volume::superblock(path);
        superblock.verify_counters().expect("right counters");
        let mut sector = vec![0; superblock.geometry.sector_size()];
        file.read_exact_at(&mut sector, 0).expect("a sector");
        assert_eq!(superblock.fields.encode(), sector);
        Self { file, superblock }
    }

    fn geometry(&self) -> &XfsGeometry {
        &self.superblock.geometry
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, offset).expect("bytes of the image");
        bytes
    }

    fn sector(&self, offset: u64) -> Vec<u8> {
        self.read(offset, self.geometry().sector_size())
    }

    /// Walks a tree below block `at`. Returns its lowest and its highest key, and its blocks.
    fn walk(
        &self,
        tree: XfsTree,
        (at, level): (FsBlock, u16),
        owner: Option<Ino>,
        census: &mut Census,
        visit: &mut dyn FnMut(&XfsBtreeBlock<'_>, &mut Census),
    ) -> (Option<XfsSearchKey>, Option<XfsSearchKey>, u64) {
        let geometry = self.geometry();
        let place = geometry.place_of(at).expect("a block of the volume");
        let bytes = self.read(place.bytes(), geometry.block_size());
        assert_eq!(XfsTree::of_block(&bytes, geometry), Some(tree));
        let block = XfsBtreeBlock::verify(&bytes, geometry, tree, at, owner).expect("a block");
        assert_eq!(block.header.level, level, "{tree:?} {at}");
        assert_rebuilds(&bytes, &block, geometry, at, owner.unwrap_or(Ino(0)));
        *census.blocks.entry((format!("{tree:?}"), level)).or_default() += 1;
        let (ag, _) = geometry.split(at).expect("a group");
        let (mut blocks, mut highest) = (1, None);
        for index in 0..block.len() {
            let high = block.high_key(index);
            if let Some(child) = block.pointer(index) {
                let child = if tree.is_long() {
                    FsBlock(child)
                } else {
                    geometry.fs_block(ag, AgBlock(u32::try_from(child).expect("32 bits")))
                };
                let below = self.walk(tree, (child, level - 1), owner, census, visit);
                assert_eq!(block.key(index), below.0, "{tree:?} {at} {index}");
                if tree == XfsTree::ReverseMap {
                    assert_eq!(high, below.1, "{tree:?} {at} {index}");
                }
                blocks += below.2;
            }
            highest = highest.max(high);
        }
        visit(&block, census);
        (block.key(0), highest, blocks)
    }

    fn census(&self) -> Census {
        let mut census = Census::default();
        for ag in (0..self.geometry().ag_count).map(AgNumber) {
            self.walk_group(ag, &mut census);
        }
        let fields = &self.superblock.fields;
        assert_eq!((census.inodes, census.free_inodes), (fields.icount.get(), fields.ifree.get()));
        census
    }

    fn walk_group(&self, ag: AgNumber, census: &mut Census) {
        let geometry = self.geometry();
        let sector = self.sector(Agf::offset(geometry, ag));
        let agf = Agf::parse(&sector, geometry, ag).expect("an AGF");
        let mut again = vec![0; sector.len()];
        agf.write(&mut again, geometry);
        assert_eq!(again, sector);
        assert!(agf.is_free_list_consistent(geometry));
        let sector = self.sector(Agfl::offset(geometry, ag));
        let agfl = Agfl::parse(&sector, geometry, ag).expect("an AGFL");
        assert_eq!(agfl.encode(geometry, ag), sector);
        let ring = agfl.ring(agf, geometry, ag).expect("a ring");
        assert_eq!(ring.len(), agf.flcount.get() as usize);
        let sector = self.sector(Agi::offset(geometry, ag));
        let agi = Agi::parse(&sector, geometry, ag).expect("an AGI");
        let mut again = vec![0; sector.len()];
        agi.write(&mut again, geometry);
        assert_eq!(again, sector);

        let root = |root: u32, levels: u32| {
            let level = u16::try_from(levels - 1).expect("few levels");
            (geometry.fs_block(ag, AgBlock(root)), level)
        };
        let mut below_roots = 0;
        for (index, tree) in [XfsTree::FreeByBlock, XfsTree::FreeBySize].into_iter().enumerate() {
            let (mut free, mut longest) = (0, 0);
            let root = root(agf.roots[index].get(), agf.levels[index].get());
            let (_, _, blocks) = self.walk(tree, root, None, census, &mut |block, _| {
                for record in block.records::<XfsFreeExtent>() {
                    free += record.count.get();
                    longest = longest.max(record.count.get());
                }
            });
            assert_eq!((free, longest), (agf.freeblks.get(), agf.longest.get()), "{tree:?}");
            below_roots += blocks - 1;
            census.free += u64::from(free) * u64::from(index == 0);
        }
        if geometry.layout.contains(XfsLayout::REVERSE_MAP) {
            let root = root(agf.roots[2].get(), agf.levels[2].get());
            let (_, _, blocks) =
                self.walk(XfsTree::ReverseMap, root, None, census, &mut |block, census| {
                    let records = block.records::<XfsReverseMap>().iter();
                    census.owned +=
                        records.map(|record| u64::from(record.count.get())).sum::<u64>();
                });
            assert_eq!(blocks, u64::from(agf.rmap_blocks.get()));
            below_roots += blocks - 1;
        }
        assert_eq!(below_roots, u64::from(agf.btreeblks.get()));
        if geometry.layout.contains(XfsLayout::SHARED_BLOCKS) {
            let root = root(agf.refcount_root.get(), agf.refcount_level.get());
            let (_, _, blocks) =
                self.walk(XfsTree::ReferenceCounts, root, None, census, &mut |block, census| {
                    census.shared += block.records::<XfsSharedExtent>().len() as u64;
                });
            assert_eq!(blocks, u64::from(agf.refcount_blocks.get()));
        }
        let mut chunks: Vec<XfsInodeChunk> = Vec::new();
        let inodes = root(agi.root.get(), agi.level.get());
        let (_, _, blocks) = self.walk(XfsTree::Inodes, inodes, None, census, &mut |block, _| {
            chunks.extend(block.records::<XfsInodeChunk>());
        });
        if geometry.layout.contains(XfsLayout::FREE_INODES) {
            let mut with_free: Vec<XfsInodeChunk> = Vec::new();
            let inodes = root(agi.free_root.get(), agi.free_level.get());
            let (_, _, free_blocks) =
                self.walk(XfsTree::FreeInodes, inodes, None, census, &mut |block, _| {
                    with_free.extend(block.records::<XfsInodeChunk>());
                });
            let expected: Vec<_> =
                chunks.iter().copied().filter(|chunk| chunk.free(geometry) != 0).collect();
            assert_eq!(with_free, expected);
            if self.superblock.fields.ro_compat().contains(XfsRoCompat::INOBTCNT) {
                let counted = (u64::from(agi.iblocks.get()), u64::from(agi.fblocks.get()));
                assert_eq!((blocks, free_blocks), counted);
            }
        }
        let (mut count, mut free) = (0, 0);
        for chunk in &chunks {
            count += chunk.allocated(geometry).count_ones();
            let (holes, mask) = (chunk.holes(geometry), chunk.free(geometry));
            free += mask.count_ones();
            census.sparse += u64::from(holes != 0);
            assert_eq!(XfsInodeChunk::new(geometry, chunk.start(), holes, mask), *chunk);
            for index in (0..64).filter(|index| chunk.allocated(geometry) & 1 << index != 0) {
                let ino = geometry.ino(ag, AgIno(chunk.start().0 + index));
                let is_used = chunk.in_use() & 1 << index != 0;
                self.visit_inode(ino, is_used, census);
            }
        }
        assert_eq!((count, free), (agi.count.get(), agi.freecount.get()));
        census.inodes += u64::from(count);
        census.free_inodes += u64::from(free);
    }

    fn visit_inode(&self, ino: Ino, is_used: bool, census: &mut Census) {
        let geometry = self.geometry();
        let (ag, block, index) = geometry.locate(ino).expect("a place");
        let offset = geometry.place(ag, block).bytes() + (u64::from(index) << geometry.inode_log);
        let bytes = self.read(offset, geometry.inode_size());
        let inode = XfsInode::verify(&bytes, geometry, ino)
            .unwrap_or_else(|error| panic!("inode {ino}: {error}"));
        let mut again = bytes.clone();
        again[100..104].fill(0);
        inode.core.write(&mut again, geometry);
        if geometry.has_checksums() {
            assert_eq!(again, bytes);
        }
        let core = inode.core;
        assert_eq!(core.is_free(), !is_used, "inode {ino}");
        if !is_used {
            return;
        }
        assert_eq!(core.next_unlinked(geometry, ag), Ok(None));
        let room = core.fork_room(geometry).expect("room");
        let (data, attributes) = core.extent_counts();
        let forks = [
            (Some(&inode.data), data, room.data),
            (inode.attributes.as_ref(), attributes.into(), room.attributes),
        ];
        let mut blocks = 0;
        for (fork, expected, room) in forks {
            let mut extents: Vec<XfsExtentItem> = Vec::new();
            match fork {
                Some(XfsFork::Extents(list)) => extents.extend(*list),
                Some(XfsFork::Btree(top)) => {
                    for &(key, child) in &top.children {
                        let below = (child, top.level - 1);
                        let (low, _, count) = self.walk(
                            XfsTree::Extents,
                            below,
                            Some(ino),
                            census,
                            &mut |leaf, _| {
                                extents.extend(leaf.records::<XfsExtentItem>());
                            },
                        );
                        assert_eq!(low, Some(XfsSearchKey([key.0, 0, 0])));
                        blocks += count;
                    }
                    assert_root_rebuilds(top, &bytes[room], geometry, ino);
                }
                _ => {}
            }
            assert_eq!(extents.len() as u64, expected, "inode {ino}");
            for item in extents {
                blocks += u64::from(item.get().count);
                assert_eq!(XfsExtentItem::from(item.get()), item);
            }
        }
        assert_eq!(blocks, core.nblocks.get(), "inode {ino}");
        let (major, minor) = match inode.data {
            XfsFork::Device(field) => device_number(field),
            _ => (0, 0),
        };
        let time = core.time(core.mtime);
        assert_eq!(core.time_field(time), core.mtime);
        let line = format!(
            "{:x} {} {} {}.{:09} {major:x} {minor:x}",
            core.mode,
            core.size,
            core.links(),
            time.seconds,
            time.nanoseconds
        );
        census.files.insert(ino.0, line);
    }
}

/// Compares the fields of a superblock with what `xfs_db` calls by the same names.
fn assert_fields(image: &str, superblock: &XfsSuperblock) {
    let printed = run("xfs_db", &["-r", "-c", "sb 0", "-c", "print", image]);
    let printed: BTreeMap<&str, &str> =
        printed.lines().filter_map(|line| line.split_once(" = ")).collect();
    let fields = &superblock.fields;
    let numbers: [(&str, u64); 28] = [
        ("blocksize", fields.blocksize.get().into()),
        ("dblocks", fields.dblocks.get()),
        ("rextents", fields.rextents.get()),
        ("logstart", fields.logstart.get()),
        ("rootino", fields.rootino.get()),
        ("rbmino", fields.rbmino.get()),
        ("rsumino", fields.rsumino.get()),
        ("rextsize", fields.rextsize.get().into()),
        ("agblocks", fields.agblocks.get().into()),
        ("agcount", fields.agcount.get().into()),
        ("logblocks", fields.logblocks.get().into()),
        ("sectsize", fields.sectsize.get().into()),
        ("inodesize", fields.inodesize.get().into()),
        ("inopblock", fields.inopblock.get().into()),
        ("agblklog", fields.agblklog.into()),
        ("inprogress", fields.inprogress.into()),
        ("imax_pct", fields.imax_pct.into()),
        ("icount", fields.icount.get()),
        ("ifree", fields.ifree.get()),
        ("fdblocks", fields.fdblocks.get()),
        ("qflags", fields.qflags.get().into()),
        ("inoalignmt", fields.inoalignmt.get().into()),
        ("unit", fields.unit.get().into()),
        ("width", fields.width.get().into()),
        ("dirblklog", fields.dirblklog.into()),
        ("logsectlog", fields.logsectlog.into()),
        ("logsunit", fields.logsunit.get().into()),
        ("spino_align", fields.spino_align.get().into()),
    ];
    for (name, number) in numbers {
        assert_eq!(printed[name], number.to_string(), "{name}");
    }
    let words = [
        ("versionnum", u32::from(fields.versionnum.get())),
        ("features2", fields.features2.get()),
        ("features_ro_compat", fields.ro_compat.get()),
        ("features_incompat", fields.incompat.get()),
    ];
    for (name, word) in words {
        assert_eq!(printed[name], format!("{word:#x}"), "{name}");
    }
    assert_eq!(printed["uuid"], uuid::Uuid::from_bytes(fields.uuid).to_string());
}

/// Builds a block again from its views, and compares it with the block without its unused room.
fn assert_rebuilds(
    bytes: &[u8],
    block: &XfsBtreeBlock<'_>,
    geometry: &XfsGeometry,
    at: FsBlock,
    owner: Ino,
) {
    let (tree, header) = (block.tree, block.header);
    let mut builder =
        XfsBtreeBuilder::new(geometry, tree, at, owner, header.level).expect("a tree");
    builder.set_siblings(header.left, header.right);
    if let Some(lsn) = header.lsn {
        builder.set_lsn(lsn);
    }
    let mut expected = bytes.to_vec();
    let start = tree.header_len(geometry);
    let mut clear = |from: usize, to: usize| expected[start + from..start + to].fill(0);
    let room = geometry.block_size() - start;
    if header.level == 0 {
        let records: Vec<u8> =
            (0..block.len()).filter_map(|i| block.record(i)).flatten().copied().collect();
        assert!(builder.set_records(&records));
        clear(records.len(), room);
    } else {
        let (mut keys, mut pointers) = (Vec::new(), Vec::new());
        for index in 0..block.len() {
            let low = block.key(index).expect("a key");
            tree.push_key(&mut keys, low, block.high_key(index).unwrap_or(low));
            pointers.extend(block.pointer(index));
        }
        assert!(builder.set_children(&keys, &pointers));
        let first = tree.capacity(geometry, 1) * tree.key_len();
        clear(keys.len(), first);
        clear(first + pointers.len() * tree.pointer_len(), room);
    }
    seal(&mut expected, geometry, tree);
    assert!(builder.into_bytes() == expected, "{tree:?} {at} differs");
}

fn assert_root_rebuilds(root: &XfsForkRoot, fork: &[u8], geometry: &XfsGeometry, ino: Ino) {
    let region = root.to_log(geometry, ino);
    assert_eq!(XfsForkRoot::from_log(&region, geometry).as_ref(), Ok(root));
    let mut again = vec![0xff; fork.len()];
    assert!(root.write(&mut again));
    assert_eq!(XfsForkRoot::parse(&again, geometry).as_ref(), Ok(root));
}

/// Lets the kernel fill a volume, and compares all of it.
fn compare(
    name: &str,
    contents: &str,
    block: &str,
    options: &[&str],
) -> Option<(Census, XfsSuperblock)> {
    if !volume::has_judges() {
        return None;
    }
    let dir = ScratchDir::new(name);
    let image = dir.0.join("image");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/volumes/make.sh");
    let fixed = [script.to_str().expect("UTF-8"), image.to_str().expect("UTF-8"), contents, block];
    let args: Vec<&str> = fixed.into_iter().chain(options.iter().copied()).collect();
    let told = run("sh", &args);
    let volume = VolumeImage::open(&image);
    assert_eq!(volume.superblock.fields.obstacles(), []);
    assert_fields(fixed[1], &volume.superblock);
    let census = volume.census();
    let mut compared = 0;
    for line in told.lines() {
        let (ino, rest) = line.split_once(' ').expect("an inode number");
        let ino: u64 = ino.parse().expect("a number");
        assert_eq!(census.files[&ino], rest, "inode {ino}");
        compared += 1;
    }
    assert!(compared > 2000, "{compared} files compared");
    println!("{name}: {:?}", census.blocks);
    Some((census, volume.superblock.clone()))
}

#[test]
fn all_trees_with_small_blocks_are_as_the_kernel_says() {
    let options = ["-m", "rmapbt=1,reflink=1", "-i", "nrext64=1"];
    let Some((census, _)) = compare("small", "trees", "1024", &options) else { return };
    let depth = |tree: XfsTree| {
        let name = format!("{tree:?}");
        census.blocks.keys().filter(|(tree, _)| *tree == name).count()
    };
    for tree in XfsTree::ALL {
        assert!(depth(tree) >= 2, "{tree:?}");
    }
    assert!(depth(XfsTree::ReverseMap) >= 3);
    assert!(census.shared > 100);
    assert!(census.owned > census.free / 100);
}

#[test]
fn a_volume_with_old_times_and_large_sectors_is_as_the_kernel_says() {
    let options = ["-s", "size=4096", "-m", "bigtime=0,inobtcount=0,reflink=0", "-i", "size=1024"];
    let Some((_, superblock)) = compare("old", "trees", "4096", &options) else { return };
    assert!(!superblock.geometry.layout.contains(XfsLayout::SHARED_BLOCKS));
}

#[test]
fn a_volume_with_the_largest_blocks_and_inodes_is_as_the_kernel_says() {
    let options = ["-i", "size=2048", "-m", "rmapbt=1"];
    let Some((_, superblock)) = compare("large", "trees", "65536", &options) else { return };
    assert_eq!(superblock.geometry.inodes_per_block_log(), 5);
}

#[test]
fn what_mkfs_makes_of_each_block_size_is_accepted() {
    if !volume::has_judges() {
        return;
    }
    let dir = ScratchDir::new("sizes");
    let image = dir.0.join("image");
    let path = image.to_str().expect("UTF-8");
    let device = format!("file,name={path},size=640m");
    for block_log in 10..=16 {
        for inode_log in 9..=11.min(block_log - 1) {
            for sparse in ["sparse=0", "sparse=1"] {
                let (block, inode) = (1 << block_log, 1 << inode_log);
                let block = format!("size={block}");
                let inode = format!("size={inode},{sparse}");
                run("mkfs.xfs", &["-q", "-f", "-d", &device, "-b", &block, "-i", &inode]);
                let made = volume::superblock(&image);
                assert_eq!(made.fields.obstacles(), [], "{block} {inode}");
                assert_eq!(made.fields.log_unit(), 512.max(made.fields.logsunit.get() as usize));
            }
        }
    }
}

#[test]
fn sparse_chunks_of_inodes_are_as_the_kernel_says() {
    let Some((census, _)) = compare("sparse", "sparse", "4096", &[]) else { return };
    assert!(census.sparse > 1, "{} sparse chunks", census.sparse);
}

#[test]
fn a_volume_of_version_4_is_read_and_not_written() {
    if !volume::has_judges() {
        return;
    }
    let dir = ScratchDir::new("v4");
    let (image, proto) = (dir.0.join("image"), dir.0.join("proto"));
    let mut text = "/\n0 0\nd--755 0 0\n".to_owned();
    for index in 0..2000 {
        writeln!(text, "f{index} ---644 {index} 7 /etc/passwd").expect("a string takes it");
    }
    text += "link l--777 0 0 target\nnull c--666 0 0 1 3\n$\n";
    std::fs::write(&proto, text).expect("a prototype");
    let (path, proto) = (image.to_str().expect("UTF-8"), proto.to_str().expect("UTF-8"));
    let device = format!("file,name={path},size=320m");
    for inode in ["size=256", "size=512"] {
        let args = ["-q", "-f", "-d", &device, "-m", "crc=0,finobt=0", "-i", inode];
        run("mkfs.xfs", &[&args[..], &["-b", "size=1024", "-p", proto]].concat());
        let volume = VolumeImage::open(&image);
        let obstacles = volume.superblock.fields.obstacles();
        let kinds: Vec<_> = obstacles.iter().map(|obstacle| obstacle.kind).collect();
        assert_eq!(kinds, [XfsObstacleKind::V4]);
        assert_eq!(kinds[0].hindrance(), XfsHindrance::Writing);
        let census = volume.census();
        assert!(census.files.len() >= 2003, "{} files", census.files.len());
        assert!(census.files.values().any(|line| line.ends_with(" 1 3")));
    }
}
