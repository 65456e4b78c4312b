//! The check: each finding has a number, a line in the documents, and a damage that leads to it.
//! `xfs_repair -n` judges that the damage is one. `judged.rs` has the sound volumes, which have no
//! findings.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::sync::Arc;

use offshoot_device::{BlockDevice, Fault, FaultDevice, RequestKind};
use offshoot_testkit::fill::{directory, write};
use offshoot_testkit::run::run;
use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::fill::colliding;
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::XfsRecipe;
use offshoot_vfs::FileSystem;
use offshoot_xfs::{
    XfsCheckResult, XfsFindingCode as Code, XfsLogState, XfsOptions, XfsVolume, check_xfs,
};
use offshoot_xfs_format::csum;
use rustix::fs::{XattrFlags, lsetxattr};

/// The files that damages name.
const FILES: [&str; 9] = ["a", "b", "tree", "block", "leaf", "node", "short", "link", "value"];

fn fill(root: &Path) {
    write(&root.join("a"), &vec![b'a'; 20_000]);
    write(&root.join("b"), &vec![b'b'; 20_000]);
    let names = ["a", "c"].map(|name| root.join(name).display().to_string());
    run("cp", &["--reflink=always", &names[0], &names[1]]);
    let tree = File::create(root.join("tree")).unwrap();
    for number in 0..900 {
        tree.write_all_at(&[b't'; 4096], number * 8192).unwrap();
    }
    for (name, entries) in [("block", 40), ("leaf", 300), ("node", 4000)] {
        let dir = directory(root, name);
        (0..entries).for_each(|number| write(&dir.join(format!("entry number {number}")), b""));
    }
    let short = directory(root, "short");
    let _ = directory(&short, "sub");
    write(&short.join("file"), b"");
    write(&short.join("bus"), b"");
    for name in colliding(24, 2) {
        write(&root.join("leaf").join(OsStr::from_bytes(&name)), b"");
    }
    symlink("t".repeat(900), root.join("link")).unwrap();
    let value = root.join("value");
    write(&value, b"");
    lsetxattr(&value, "user.big", &[b'v'; 9000], XattrFlags::empty()).unwrap();
}

/// A damage by commands of `xfs_db`, which makes checksums right. `{a}` is the inode of file `a`.
struct DbDamage {
    finds: &'static [Code],
    commands: &'static [&'static str],
}

const fn damage(finds: &'static [Code], commands: &'static [&'static str]) -> DbDamage {
    DbDamage { finds, commands }
}

const DAMAGES: &[DbDamage] = &[
    damage(&[Code::SuperblockCopy], &["sb 1", "write -d blocksize 1024"]),
    damage(&[Code::SuperblockCounter], &["sb 0", "write -d fdblocks 7"]),
    damage(&[Code::FutureChange], &["agf 1", "write -d lsn 0x7f0000000100"]),
    damage(&[Code::GroupHeader], &["agf 1", "write -d seqno 7"]),
    damage(&[Code::TreeBlock], &["agf 1", "addr bnoroot", "write -d owner 7"]),
    damage(&[Code::TreeShape], &["inode {tree}", "addr u3.bmbt.ptrs[2]", "write -d leftsib 20"]),
    damage(&[Code::FreeTrees], &["agf 0", "addr cntroot", "write -d recs[1].blockcount 1"]),
    damage(&[Code::FreeCounter], &["agf 0", "write -d btreeblks 99"]),
    damage(&[Code::FreeList], &["agf 1", "write -d flcount 3"]),
    damage(&[Code::InodeCounter], &["agi 0", "write -d count 1024"]),
    damage(&[Code::FreeInodes], &["agi 0", "addr free_root", "write -d recs[1].startino 64"]),
    damage(&[Code::Unlinked], &["agi 0", "write -d unlinked[3] {a}"]),
    damage(
        &[Code::OwnedAndFree, Code::Lost, Code::ReverseMap],
        &["inode {b}", "write -d u3.bmx[0].startblock 30000"],
    ),
    damage(&[Code::OwnedTwice], &["inode {b}", "write -d u3.bmx[0].startblock 16"]),
    damage(&[Code::ReferenceCount], &["agf 0", "addr refcntroot", "write -d recs[1].refcount 9"]),
    damage(&[Code::Inode], &["inode {a}", "write -d core.version 9"]),
    damage(&[Code::InodeState], &["inode {a}", "write -d core.mode 0"]),
    damage(
        &[Code::Extents],
        &["inode {tree}", "addr u3.bmbt.ptrs[1]", "write -d recs[251].blockcount 5"],
    ),
    damage(&[Code::ExtentCount], &["inode {tree}", "write -d core.nextents 900"]),
    damage(&[Code::BlockCount], &["inode {a}", "write -d core.nblocks 77"]),
    damage(&[Code::LinkCount], &["inode {a}", "write -d core.nlinkv2 7"]),
    damage(&[Code::SymbolicLink], &["inode {link}", "dblock 0", "write -d bytes 899"]),
    damage(&[Code::DirectoryBlock], &["inode {block}", "dblock 0", "write -d bhdr.hdr.owner 5"]),
    damage(
        &[Code::DirectoryHash],
        &["inode {leaf}", "dblock 8388608", "write -d lents[3].address 0x40"],
    ),
    damage(&[Code::DirectorySpace], &["inode {leaf}", "dblock 8388608", "write -d lbests[2] 8"]),
    damage(&[Code::DirectorySpace], &["inode {node}", "dblock 16777216", "write -d fbests[3] 8"]),
    damage(&[Code::DirectorySpace], &["inode {node}", "dblock 16777216", "write -d fhdr.nused 1"]),
    damage(&[Code::DuplicateName], &["inode {short}", "write -d u3.sfdir3.list[2].name \"sub\""]),
    damage(&[Code::AttributeSpace], &["inode {value}", "ablock 0", "write -d hdr.usedbytes 8"]),
    damage(&[Code::Entry], &["inode {short}", "write -d u3.sfdir3.list[1].inumber.i4 200000"]),
    damage(&[Code::EntryType], &["inode {short}", "write -d u3.sfdir3.list[1].filetype 3"]),
    damage(&[Code::DotDot], &["inode {sub}", "write -d u3.sfdir3.hdr.parent.i4 128"]),
    damage(&[Code::ParentPointer], &["inode {a}", "write -d a.sfattr.list[0].parent_dir.gen 9"]),
    damage(&[Code::Attribute], &["inode {value}", "ablock 0", "write -d hdr.info.owner 5"]),
];

fn check(device: &Arc<dyn BlockDevice>) -> XfsCheckResult {
    check_xfs(device, &XfsOptions::default()).unwrap()
}

fn codes(result: &XfsCheckResult) -> BTreeSet<Code> {
    result.findings.iter().map(|finding| finding.code).collect()
}

/// Checks that a damage has these findings, and that `xfs_repair` complains too.
#[track_caller]
fn assert_finds(disk: &XfsDisk, expected: &[Code], damage: &str) {
    let result = check(&disk.device());
    let texts: Vec<_> = result.findings.iter().map(ToString::to_string).collect();
    let found = codes(&result);
    let is_found = expected.iter().all(|code| found.contains(code));
    assert!(is_found, "{damage}: {expected:?} expected, found {texts:#?}");
    assert!(disk.check().is_err(), "{damage}: xfs_repair finds nothing, we {texts:#?}");
}

#[test]
fn each_damage_has_its_finding() {
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("today");
    let filled = XfsRecipe::new(kind).fill(fill).make(&judges);
    let result = check(&filled.disk.device());
    assert!(result.findings.is_empty() && !result.are_more, "{:#?}", result.findings);
    assert_eq!(result.log, XfsLogState::Empty);
    let inodes = filled.inodes();
    let mut found = BTreeSet::new();
    for DbDamage { finds, commands } in DAMAGES {
        let commands: Vec<_> = commands
            .iter()
            .map(|command| {
                let named = inodes.iter();
                named.fold((*command).to_owned(), |command, (name, ino)| {
                    command.replace(&format!("{{{name}}}"), &ino.to_string())
                })
            })
            .collect();
        let disk = filled.disk.copy();
        let commands: Vec<_> = commands.iter().map(String::as_str).collect();
        disk.change_with_xfs_db(&commands);
        assert_finds(&disk, finds, &commands.join("; "));
        found.extend(finds.iter().copied());
    }
    // These damages are not made by `xfs_db`.
    let disk = filled.disk.copy();
    patch(&disk, 108, b"?");
    assert_finds(&disk, &[Code::Superblock], "superblock");
    let disk = filled.disk.copy();
    patch(&disk, log_start(&disk), &[0xff; 4096]);
    assert_finds(&disk, &[Code::Log], "log");
    let disk = filled.disk.copy();
    make_names_equal(&disk);
    assert_finds(&disk, &[Code::DuplicateName], "equal names");
    let blocks = filled.disk.field(&["sb 0"], "agblocks");
    let root = (blocks + filled.disk.field(&["agf 1"], "bnoroot")) * 4096;
    let failing = FaultDevice::new(filled.disk.device());
    failing.add_to(RequestKind::Reads, root..root + 1, Fault::Error);
    let failing: Arc<dyn BlockDevice> = Arc::new(failing);
    assert!(codes(&check(&failing)).contains(&Code::NotRead));
    found.extend([Code::Superblock, Code::Log, Code::NotRead]);
    let missing: Vec<_> = Code::ALL.iter().filter(|code| !found.contains(code)).collect();
    assert!(missing.is_empty(), "no damage leads to {missing:?}");
}

/// The inodes of files by their names.
trait NamedInodes {
    fn inodes(&self) -> BTreeMap<&'static str, u64>;
}

impl NamedInodes for offshoot_testkit::xfs::recipe::FilledXfs {
    fn inodes(&self) -> BTreeMap<&'static str, u64> {
        let volume = XfsVolume::open(self.disk.device(), &XfsOptions::default()).unwrap();
        let at = |dir, name: &str| volume.lookup(dir, name.as_bytes()).unwrap();
        let mut inodes: BTreeMap<_, _> =
            FILES.iter().map(|name| (*name, at(volume.root(), name).ino)).collect();
        inodes.insert("sub", at(at(volume.root(), "short"), "sub").ino);
        inodes
    }
}

fn patch(disk: &XfsDisk, at: u64, bytes: &[u8]) {
    let image = File::options().write(true).open(disk.image()).unwrap();
    image.write_all_at(bytes, at).unwrap();
}

/// Gives the second of two names with one hash the bytes of the first.
fn make_names_equal(disk: &XfsDisk) {
    let [first, second] = &colliding(24, 2)[..] else { panic!("two names") };
    let device = disk.device();
    let mut block = vec![0; 4096];
    for at in (0..device.size_bytes()).step_by(block.len()) {
        device.read_at(at, &mut block).unwrap();
        let place = block.windows(second.len()).position(|name| name == second);
        if let Some(place) = place.filter(|_| block.starts_with(b"XDD3")) {
            block[place..place + first.len()].copy_from_slice(first);
            csum::store(&mut block, 4);
            return patch(disk, at, &block);
        }
    }
    panic!("no directory has the name");
}

/// Where the log begins, in bytes.
fn log_start(disk: &XfsDisk) -> u64 {
    let field = |name| disk.field(&["sb 0"], name);
    let (start, log) = (field("logstart"), field("agblklog"));
    let (group, block) = (start >> log, start & ((1 << log) - 1));
    (group * field("agblocks") + block) * field("blocksize")
}

#[test]
fn a_dirty_log_is_replayed_first() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 512);
    disk.mkfs(XfsVolumeKind::named("today").mkfs);
    let mut mount = disk.mount("rw", &[]);
    let dir = directory(mount.path(), "dir");
    (0..3000).for_each(|number| write(&dir.join(format!("{number}")), b"contents"));
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(mount);
    let result = check(&disk.device());
    assert_eq!(result.log, XfsLogState::Pending);
    assert!(result.findings.is_empty(), "{:#?}", result.findings);
    assert!(result.inodes > 3000);
    // Nothing of it is in its place yet.
    let options = XfsOptions { is_log_ignored: true, ..XfsOptions::default() };
    let result = check_xfs(&disk.device(), &options).unwrap();
    assert!(result.inodes < 3000, "{} inodes", result.inodes);
}

#[test]
fn numbers_are_unique_and_documented() {
    let numbers: BTreeSet<u16> = Code::ALL.iter().map(|code| code.number()).collect();
    assert_eq!(numbers.len(), Code::ALL.len());
    assert!(numbers.iter().copied().eq(Code::ALL.iter().map(|code| code.number())), "in order");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/check.md");
    let page = fs::read_to_string(page).unwrap();
    let rows: Vec<&str> = page.lines().filter(|line| line.contains("` | 6")).collect();
    let ours = Code::ALL.iter();
    let ours = ours.map(|c| format!("| `{}` | {} | {} |", c.name(), c.number(), c.meaning()));
    assert_eq!(rows, ours.collect::<Vec<_>>(), "docs/check.md");
}
