//! Calls that meet others in a bad moment.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, channel};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_vfs::XattrMode;
use parking_lot::Mutex;
use uuid::Uuid;

use super::*;
use crate::attr::FileXattrs;
use crate::check_xfs;
use crate::live::inodes::LiveInodes;
use crate::mkfs::{XfsMkfsOptions, mkfs_xfs};

/// A device whose discards wait.
#[derive(Debug)]
struct SlowDiscards {
    below: Arc<dyn BlockDevice>,
    begun: Mutex<Sender<(u64, u64)>>,
    may_go_on: Mutex<Receiver<()>>,
}

impl offshoot_device::Delegate for SlowDiscards {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        let _ = self.begun.lock().send((offset, len));
        // Without the other end it goes on.
        let _ = self.may_go_on.lock().recv();
        self.below.discard(offset, len)
    }
}

fn memory() -> Arc<dyn BlockDevice> {
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::sparse(300 << 20));
    mkfs_xfs(&*device, &XfsMkfsOptions::new(Uuid::from_u128(0x0f5), AT)).unwrap();
    device
}

fn open(device: Arc<dyn BlockDevice>) -> (Arc<XfsLive>, FileId) {
    let options = XfsOptions::default();
    let (opened, log) = volume::open_writable(device, &options).unwrap();
    let root = crate::inode::file_id(opened.superblock.fields.root().unwrap());
    (open_live(&opened, &log, Arc::new(XfsInodes::new(1 << 20)), &options).unwrap(), root)
}

#[track_caller]
fn assert_ends_clean(live: &XfsLive, device: &Arc<dyn BlockDevice>) {
    live.shut_down().unwrap();
    let found = check_xfs(device, &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
}

/// While the device discards, files in all groups are written, and none gets what is discarded.
#[test]
fn a_group_is_not_locked_while_it_is_discarded() {
    let below = memory();
    let (begun, begins) = channel();
    let (go_on, may_go_on) = channel();
    let (begun, may_go_on) = (Mutex::new(begun), Mutex::new(may_go_on));
    let device = Arc::new(SlowDiscards { below: below.clone(), begun, may_go_on });
    let (live, root) = open(device);
    // What is free in front of this is discarded first.
    make(&live, root, "first");
    live.sync().unwrap();
    std::thread::scope(|scope| {
        let trim = scope.spawn(|| live.trim(&(0..16 << 20)));
        let (start, len) = begins.recv().unwrap();
        for number in 0..8 {
            let dir = live.mkdir(
                EntryPlace { dir: root, name: format!("dir-{number}").as_bytes() },
                &NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: AT },
            );
            let file = make(&live, dir.unwrap(), "file");
            live.write(file, 0, &vec![7; 100_000], AT).unwrap();
            let places = live.data().changes().prepare_write(Ino(file.ino), 0..25).unwrap();
            for place in places {
                let at = live.data().changes().device_place(place.start).unwrap().bytes();
                let end = at + u64::from(place.count) * 4096;
                assert!(end <= start || start + len <= at, "{at}..{end} is being discarded");
            }
        }
        drop(go_on);
        assert!(trim.join().unwrap().unwrap().bytes >= len);
    });
    // A range behind all bytes, as FITRIM may have it.
    assert_eq!(live.trim(&(u64::MAX - 5..u64::MAX)).unwrap().bytes, 0);
    assert_ends_clean(&live, &below);
}

#[test]
fn threads_that_leave_an_inode_at_once_leave_no_entry() {
    let inodes = LiveInodes::default();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..100_000).for_each(|number| drop(inodes.get(Ino(number)))));
        }
    });
    assert_eq!(inodes.len(), 0);
}

/// Names would fill the inode of a directory that is about to get its first attribute.
#[test]
fn an_attribute_waits_for_changes_of_names() {
    let device = memory();
    let (live, root) = open(device.clone());
    let new = NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: AT };
    let dir = live.mkdir(EntryPlace { dir: root, name: b"dir" }, &new).unwrap();
    std::thread::scope(|scope| {
        let names = live.names().lock([Ino(dir.ino)]).unwrap();
        let set = scope.spawn(|| live.set_xattr(dir, b"user.a", &[1; 40], XattrMode::Set, AT));
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!set.is_finished());
        drop(names);
        set.join().unwrap().unwrap();
    });
    assert_ends_clean(&live, &device);
}

/// An opening that finds that a file is gone is counted for a while, and not for the next file with
/// the number.
#[test]
fn openings_of_files_that_go_are_not_counted() {
    let device = memory();
    let (live, root) = open(device.clone());
    let new = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
    let is_ended = AtomicBool::new(false);
    let ino = make(&live, root, "first");
    live.unlink(EntryPlace { dir: root, name: b"first" }, AT).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_ended.load(Ordering::Relaxed) {
                if live.open(ino).is_ok() {
                    live.release(ino).unwrap();
                }
            }
        });
        for _ in 0..2000 {
            let file = live.create_unnamed(root, true, &new).unwrap();
            live.write(file, 0, b"content", AT).unwrap();
            live.release(file).unwrap();
        }
        is_ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(live.inodes.len(), 0);
    assert_ends_clean(&live, &device);
}

/// A listing keeps names, and no values of blocks: those of a leaf may be tens of megabytes.
#[test]
fn a_listing_reads_long_values_one_by_one() {
    let device = memory();
    let (live, root) = open(device.clone());
    let file = make(&live, root, "file");
    let value = vec![5; 10_000];
    let names: Vec<_> = (0..5).map(|number| format!("user.{number}").into_bytes()).collect();
    for name in &names {
        live.set_xattr(file, name, &value, XattrMode::Set, AT).unwrap();
    }
    let mut shown = Vec::new();
    let xattrs = FileXattrs::new(live.buffers(), &live.reading, file);
    xattrs
        .list(&mut |name, found| {
            assert!(found == value);
            // The others are gone before they are read.
            for other in names.iter().filter(|other| *other != name) {
                live.remove_xattr(file, other, AT).unwrap();
            }
            shown.push(name.to_vec());
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(shown.len(), 1);
    assert_ends_clean(&live, &device);
}
