//! Attributes of files that the kernel has made, changed by transactions of ours. The kernel, our
//! own reader and the checks find what a model says.

mod cuts;
mod forms;
mod intents;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::{LARGE_BLOCKS, RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{FileId, FileSystem};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::attr::XattrFlags;
use rustix::fs::{CWD, FileType, Mode};

use super::{OwnedXattr, XattrChange};
use crate::defer::{DeferredChain, DeferredWork, IntentIds, change_xattr};
use crate::inode::SPACE;
use crate::test_volumes::engine;
use crate::trans::{ForkName, XfsTransactionKind as Kind, XfsTransactions};
use crate::{XfsOptions, XfsVolume, check_xfs};

/// The files of a volume, by their names.
const FILES: [&str; 6] = ["plain", "in pieces", "directory", "link", "device", "many"];

const NAMESPACES: [(&str, XattrFlags); 3] = [
    ("user.", XattrFlags::empty()),
    ("trusted.", XattrFlags::TRUSTED),
    ("security.", XattrFlags::SECURE),
];

/// The blocks that a change may take.
const BLOCKS: u64 = 200;

/// A file, and the attributes that it should have, by their names with the namespace.
struct AttributedFile {
    name: &'static str,
    ino: Ino,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// A volume with files, and a model of their attributes.
struct AttributedVolume {
    disk: XfsDisk,
    ids: IntentIds,
    files: Vec<AttributedFile>,
    random: Random,
    kernel_says: Vec<&'static str>,
}

fn make_files(root: &Path) {
    for name in FILES {
        let path = root.join(name);
        match name {
            "directory" => std::fs::create_dir(&path).unwrap(),
            "link" => std::os::unix::fs::symlink("target", &path).unwrap(),
            "device" => {
                let (kind, mode) = (FileType::CharacterDevice, Mode::from_raw_mode(0o600));
                rustix::fs::mknodat(CWD, &path, kind, mode, 0x0103).unwrap();
            }
            _ => {
                let file = std::fs::File::create(&path).unwrap();
                let pieces = if name == "in pieces" { 9 } else { 0 };
                for piece in 0..pieces {
                    let at = piece << 18;
                    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], at).unwrap();
                }
            }
        }
    }
}

impl AttributedVolume {
    fn make(options: &str, seed: u64) -> Option<Self> {
        let disk = XfsDisk::create(&judges::require()?, 1 << 10);
        disk.mkfs(options);
        let kernel_says = if options.contains("65536") { vec![LARGE_BLOCKS] } else { vec![] };
        let mount = disk.mount("", &kernel_says);
        make_files(mount.path());
        let file = |name: &'static str| {
            let ino = Ino(XfsDisk::ino(&mount.path().join(name)));
            AttributedFile { name, ino, xattrs: BTreeMap::new() }
        };
        let files = FILES.map(file).into();
        drop(mount);
        let random = Random::new(seed);
        Some(Self { disk, ids: IntentIds::default(), files, random, kernel_says })
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.random.below(end as u64)).unwrap()
    }

    /// A length of a value: in each form, around each limit.
    fn value_len(&mut self, block_size: usize) -> usize {
        match self.below(20) {
            0..8 => self.below(60),
            8..11 => 200 + self.below(90),
            11..15 => self.below(block_size),
            15..17 => block_size * 3 / 4 - self.below(60),
            17..19 => self.below(6 * block_size).min(65_536),
            _ => 65_536 - self.below(3),
        }
    }

    fn name(&mut self, is_special: bool, many: usize) -> (Vec<u8>, OwnedXattr) {
        // The kernel lets only files and directories have attributes of users.
        let first = usize::from(is_special);
        let at = first + self.below(NAMESPACES.len() - first);
        let (prefix, namespace) = NAMESPACES[at];
        let number = self.below(many);
        let long = if number.is_multiple_of(7) {
            "-a longer name".repeat(number % 17)
        } else {
            String::new()
        };
        let name = format!("{number}{long}");
        let shown = format!("{prefix}{name}").into_bytes();
        (shown, OwnedXattr { namespace, name: name.into(), value: Vec::new() })
    }

    /// Sets or removes an attribute of a random file.
    fn step(&mut self, engine: &XfsTransactions, set_of_ten: usize) {
        let index = self.below(FILES.len() * 2).min(FILES.len() - 1);
        let is_special = matches!(FILES[index], "link" | "device");
        let many = if FILES[index] == "many" { 400 } else { 12 };
        let (shown, mut xattr) = self.name(is_special, many);
        let is_set = self.below(10) < set_of_ten;
        let ino = self.files[index].ino;
        let was_there = self.files[index].xattrs.contains_key(&shown);
        let change = if is_set {
            let len = self.value_len(engine.geometry().block_size());
            xattr.value = self.random.bytes(len);
            self.files[index].xattrs.insert(shown, xattr.value.clone());
            XattrChange::set(ino, xattr)
        } else {
            self.files[index].xattrs.remove(&shown);
            XattrChange::remove(ino, xattr)
        };
        Self::assert_is_there(engine, &change, was_there);
        self.change(engine, change);
        if self.below(60) == 0 {
            engine.log().force_all().unwrap();
        }
        if self.below(150) == 0 {
            engine.log().push_tail().unwrap();
        }
    }

    fn assert_is_there(engine: &XfsTransactions, change: &XattrChange, was_there: bool) {
        let mut t = engine.begin(Kind::ChangeAttribute, 0).unwrap();
        assert_eq!(change.is_there(&mut t).unwrap(), was_there, "{change:?}");
    }

    fn change(&self, engine: &XfsTransactions, change: XattrChange) {
        let t = engine.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
        change_xattr(t, &self.ids, change).unwrap();
    }

    fn remove_all(&mut self, engine: &XfsTransactions) {
        for file in &mut self.files {
            for shown in std::mem::take(&mut file.xattrs).into_keys() {
                let with_prefix = |(prefix, namespace): &(&str, XattrFlags)| {
                    Some((shown.strip_prefix(prefix.as_bytes())?.to_vec(), *namespace))
                };
                let (name, namespace) = NAMESPACES.iter().find_map(with_prefix).unwrap();
                let xattr = OwnedXattr { namespace, name, value: Vec::new() };
                let t = engine.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
                change_xattr(t, &self.ids, XattrChange::remove(file.ino, xattr)).unwrap();
            }
        }
    }

    /// Cuts the log. The kernel recovers it, and finds what the model says.
    fn assert_cut_recovers(&self, engine: &XfsTransactions) {
        engine.log().force_all().unwrap();
        let cut = self.disk.copy();
        let recovering = [&self.kernel_says[..], &[RECOVERY]].concat();
        self.assert_kernel_finds(cut.mount("nouuid", &recovering).path());
        cut.assert_checks();
    }

    fn assert_kernel_finds(&self, root: &Path) {
        for file in &self.files {
            let path = root.join(file.name);
            assert_eq!(shown_by_kernel(&path), file.xattrs, "{}", file.name);
        }
    }

    /// Our reader, our check, `xfs_repair` and the kernel find what the model says, after a clean
    /// unmount. The kernel removes the files afterwards.
    fn assert_unmounts(self, engine: XfsTransactions) {
        engine.unmount().unwrap();
        self.disk.assert_checks();
        let found = check_xfs(&self.disk.device(), &XfsOptions::default()).unwrap();
        assert!(found.findings.is_empty(), "{:#?}", found.findings);
        let volume = XfsVolume::open(self.disk.device(), &XfsOptions::default()).unwrap();
        for file in &self.files {
            let id = FileId { dev: SPACE, ino: file.ino.0 };
            let mut shown = BTreeMap::new();
            let mut visit = |name: &[u8], value: &[u8]| {
                shown.insert(name.to_vec(), value.to_vec());
                ControlFlow::Continue(())
            };
            volume.xattrs(id, &mut visit).unwrap();
            assert_eq!(shown, file.xattrs, "{}", file.name);
        }
        drop(volume);
        let mount = self.disk.mount("", &self.kernel_says);
        self.assert_kernel_finds(mount.path());
        for name in FILES {
            let path = mount.path().join(name);
            let remove =
                if name == "directory" { std::fs::remove_dir } else { std::fs::remove_file };
            remove(path).unwrap();
        }
        drop(mount);
        self.disk.assert_checks();
    }
}

/// The attributes of a file as the kernel shows them.
fn shown_by_kernel(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 65_536];
    let len = rustix::fs::llistxattr(path, &mut names).unwrap();
    let names = names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let mut value = vec![0; 65_536];
            let len = rustix::fs::lgetxattr(path, name, &mut value).unwrap();
            value.truncate(len);
            (name.to_vec(), value)
        })
        .collect()
}

/// Grows and shrinks the attributes of files, and removes all at the end.
fn churn(options: &str, steps: usize) {
    let Some(mut volume) = AttributedVolume::make(options, seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    for set_of_ten in [8, 2, 7] {
        for _ in 0..steps {
            volume.step(&engine, set_of_ten);
        }
    }
    volume.assert_cut_recovers(&engine);
    if options.contains("size=1024") {
        volume.remove_all(&engine);
    }
    volume.assert_unmounts(engine);
}

#[test]
fn judges_find_the_attributes_of_the_model() {
    churn("", 500);
}

#[test]
fn judges_find_the_attributes_of_the_model_in_a_volume_with_parent_pointers() {
    churn("-n parent=1", 300);
}

#[test]
fn judges_find_the_attributes_of_the_model_in_small_blocks() {
    churn("-b size=1024", 600);
}

#[test]
fn judges_find_the_attributes_of_the_model_in_large_blocks() {
    churn("-b size=65536", 150);
}

#[test]
fn judges_find_the_attributes_of_the_model_in_large_inodes() {
    churn("-i size=2048", 300);
}

#[test]
fn judges_find_the_attributes_of_the_model_with_narrow_counts() {
    churn("-i nrext64=0 -m rmapbt=0,reflink=0", 300);
}

/// A value in blocks replaces another one, and is removed: after each step the kernel recovers a
/// volume with the old value or the new one, and our next change of the attribute leaves nothing.
#[test]
fn each_step_leaves_the_old_value_or_the_new_one() {
    let Some(volume) = AttributedVolume::make("-b size=1024 -n parent=1", seed_of_run()) else {
        return;
    };
    let file = &volume.files[0];
    let xattr = |byte: u8, len: usize| OwnedXattr {
        namespace: XattrFlags::TRUSTED,
        name: b"name".to_vec(),
        value: vec![byte; len],
    };
    let changes = [
        (XattrChange::set(file.ino, xattr(1, 3000)), None, Some(vec![1; 3000])),
        (XattrChange::set(file.ino, xattr(2, 9000)), Some(vec![1; 3000]), Some(vec![2; 9000])),
        (XattrChange::set(file.ino, xattr(3, 30)), Some(vec![2; 9000]), Some(vec![3; 30])),
        (XattrChange::set(file.ino, xattr(4, 2000)), Some(vec![3; 30]), Some(vec![4; 2000])),
        (XattrChange::remove(file.ino, xattr(0, 0)), Some(vec![4; 2000]), None),
    ];
    let engine = engine(&volume.disk);
    let mut steps = 0;
    for (mut change, old, new) in changes {
        loop {
            let mut t = engine.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
            let step = change.step(&mut t).unwrap();
            let mut chain = DeferredChain::new(&volume.ids);
            let of = (file.ino, ForkName::Attributes);
            let work = DeferredWork::unmapped(&mut t, of, &step).unwrap();
            chain.defer(&mut t, work);
            chain.finish(t, &[]).unwrap();
            steps += 1;
            engine.log().force_all().unwrap();
            let cut = volume.disk.copy();
            let mount = cut.mount("nouuid", &[RECOVERY]);
            let shown = shown_by_kernel(&mount.path().join(file.name)).remove(&b"trusted.name"[..]);
            assert!(shown == new || !step.is_done && shown == old, "step {steps}");
            drop(mount);
            if let Err(finding) = cut.check() {
                let is_known = !step.is_done && finding.contains("is INCOMPLETE");
                assert!(is_known, "step {steps}: {finding}");
            }
            // What the cut has left goes with the next change.
            let again = self::engine(&cut);
            let t = again.begin(Kind::ChangeAttribute, BLOCKS).unwrap();
            change_xattr(t, &IntentIds::default(), XattrChange::remove(file.ino, xattr(0, 0)))
                .unwrap();
            again.unmount().unwrap();
            cut.assert_checks();
            let found = check_xfs(&cut.device(), &XfsOptions::default()).unwrap();
            assert!(found.findings.is_empty(), "step {steps}: {:#?}", found.findings);
            if step.is_done {
                break;
            }
        }
    }
    assert!(steps > 12, "{steps}");
    volume.assert_unmounts(engine);
}
