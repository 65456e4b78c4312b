//! Ioctls of files and of the volume, and the programs that make them.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;
use std::time::Duration;

use offshoot_testkit::run::{command, run};
use rustix::fs::{IFlags, OFlags, ioctl_getflags, ioctl_setflags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater, ioctl};

use super::{ServedMount, as_user, assert_alike, require, twins, volume};

const FSGETXATTR: Opcode = 0x801c_581f;
const FSSETXATTR: Opcode = 0x401c_5820;
const GETVERSION: Opcode = 0x8008_7601;
const GETFSLABEL: Opcode = 0x8100_9431;
const SETFSLABEL: Opcode = 0x4100_9432;
const FITRIM: Opcode = 0xc018_5879;
const SHUTDOWN: Opcode = 0x8004_587d;

/// The user whose calls are refused what root may do.
const USER: u32 = 1000;

/// Makes the ioctl `NUMBER` with `value`, which it may change.
#[expect(unsafe_code, reason = "the standard library has no ioctls")]
fn call<const NUMBER: Opcode, T: Copy>(on: &File, mut value: T) -> Result<T, Errno> {
    assert_eq!(NUMBER >> 16 & 0x3fff, size_of::<T>() as Opcode);
    // SAFETY: the number contains the size of the value, which outlives the call.
    unsafe { ioctl(on, Updater::<NUMBER, _>::new(&mut value)) }?;
    Ok(value)
}

fn new_file(path: &Path) -> File {
    fs::write(path, "data").expect("a file");
    chown(path, Some(USER), Some(USER)).expect("root may");
    File::open(path).expect("it is there")
}

/// Sets flags and sizes of files, and returns the results.
fn extended_flags(root: &Path) -> Vec<String> {
    let (file, dir) = (new_file(&root.join("flags")), File::open(root).expect("the root"));
    let mut said = Vec::new();
    let mut set = |on: &File, xflags: u32, others: [u32; 4], is_root: bool| {
        let [extsize, nextents, projid, cowextsize] = others;
        let words = [xflags, extsize, nextents, projid, cowextsize, 0, 0];
        let act = || call::<FSSETXATTR, _>(on, words);
        let result = if is_root { act() } else { as_user(USER, act) };
        let now = call::<FSGETXATTR, _>(on, [0_u32; 7]);
        let plain = ioctl_getflags(on);
        said.push(format!("{xflags:#x} {others:?} {is_root}: {result:x?} {now:x?} {plain:?}"));
    };
    let kept = IFlags::COMPRESSED | IFlags::NODUMP;
    ioctl_setflags(&file, kept).expect("btrfs has both");
    for bit in (0..32).map(|bit| 1 << bit) {
        for is_root in [true, false] {
            set(&file, bit, [0; 4], is_root);
        }
        set(&file, 0, [0; 4], true);
    }
    set(&file, 0xf8, [0; 4], true);
    set(&file, 0, [0; 4], false);
    set(&file, 0, [0; 4], true);
    for (others, flag) in [
        ([4096, 0, 0, 0], 0),
        ([4096, 0, 0, 0], 0x800),
        ([0, 7, 0, 0], 0),
        ([0, 0, 5, 0], 0),
        ([0, 0, 0, 4096], 0),
        ([0, 0, 0, 4096], 0x1_0000),
    ] {
        set(&file, flag, others, true);
        set(&file, flag, others, false);
    }
    set(&dir, 0xe0, [0; 4], true);
    set(&dir, 0x200, [0; 4], true);
    set(&dir, 0, [0; 4], true);
    said
}

/// A label in the form of the ioctls.
fn label_of(text: &[u8]) -> [u8; 256] {
    let mut label = [0; 256];
    label[..text.len()].copy_from_slice(text);
    label
}

/// Reads and changes the label, trims, and returns the results.
fn of_the_volume(root: &Path) -> Vec<String> {
    let (file, dir) = (new_file(&root.join("file")), File::open(root).expect("the root"));
    let mut said = Vec::new();
    let mut note = |what: &str, result: String| said.push(format!("{what}: {result}"));
    let get = |on: &File| {
        let label = call::<GETFSLABEL, _>(on, [0_u8; 256]);
        format!("{:?}", label.map(|label| String::from_utf8_lossy(&label).into_owned()))
    };
    for (text, is_root) in
        [(&b"one"[..], true), (b"two", false), (&[b'x'; 256], true), (&[b'y'; 255], true)]
    {
        let label = label_of(text);
        let set = || call::<SETFSLABEL, _>(&dir, label).map(drop);
        let set = if is_root { set() } else { as_user(USER, set) };
        note("set label", format!("{set:?}"));
        note("label of a file", as_user(USER, || get(&file)));
    }
    note("set label on a file", format!("{:?}", call::<SETFSLABEL, _>(&file, label_of(b"z"))));
    note("label", get(&dir));
    for range in [[0, u64::MAX, 0], [0, 4095, 0], [u64::MAX, 1 << 20, 0], [5, 0, 0]] {
        for on in [&dir, &file] {
            let by_user = as_user(USER, || call::<FITRIM, _>(on, range).map(drop));
            note(&format!("trim {range:?} by a user"), format!("{by_user:?}"));
            let trimmed = call::<FITRIM, _>(on, range);
            // The kernel returns the least length that its device can discard too.
            let trimmed = trimmed.map(|[start, len, _]| (start, len > 0));
            note(&format!("trim {range:?}"), format!("{trimmed:?}"));
        }
    }
    said
}

/// The same ioctls on a mount of ours and on one of the kernel have the same results.
#[test]
fn ioctls_do_the_same() {
    let Some(judges) = require() else { return };
    let (ours, theirs) = twins(&judges, 256);
    let mounted = ServedMount::new(&ours.images()[0], "allow_other");
    let kernel = theirs.mount("noatime");
    for ioctls in [extended_flags, of_the_volume] {
        let (said, expected) = (ioctls(mounted.path()), ioctls(kernel.path()));
        assert_alike(&said, &expected);
    }
    mounted.unmount();
    ours.assert_checks();
}

/// Our mount shows the generations of files that the kernel shows.
#[test]
fn generations_are_the_same() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let generations = |root: &Path| {
        ["", "first", "second"].map(|name| {
            let file = File::open(root.join(name)).expect("it is there");
            call::<GETVERSION, _>(&file, 0_u64).expect("it has one")
        })
    };
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    for name in ["first", "second"] {
        let file = File::create(mounted.path().join(name)).expect("a file");
        file.sync_all().expect("it is stored");
        super::does(&["sync".as_ref(), mounted.path().as_os_str()]);
    }
    let shown = generations(mounted.path());
    assert!(shown[1] < shown[2], "{shown:?}");
    mounted.unmount();
    assert_eq!(shown, generations(disks.mount("ro").path()));
}

/// `fstrim` and `btrfs filesystem label` work on a mount.
#[test]
fn programs_trim_and_label() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let root = mounted.path().as_os_str();
    for range in ["", "-o20000001", "-l1000000001", "-o20000001 -l30000001"] {
        let words = ["-v"].into_iter().chain(range.split_whitespace()).map(AsRef::as_ref);
        let said = run("fstrim", &words.chain([root]).collect::<Vec<&OsStr>>());
        assert!(said.contains("bytes) trimmed"), "{range}: {said}");
        fs::write(mounted.path().join(format!("after{range}")), vec![7; 3 << 20])
            .expect("there is room");
    }
    let label = |words: &[&OsStr]| {
        run("btrfs", &[&["filesystem".as_ref(), "label".as_ref(), root][..], words].concat())
    };
    label(&["data of 2026".as_ref()]);
    assert_eq!(label(&[]), "data of 2026\n");
    mounted.unmount();
    disks.assert_checks();
    let kernel = disks.mount("ro");
    let said = command("btrfs").args(["filesystem", "label"]).arg(kernel.path()).output();
    assert_eq!(said.expect("btrfs starts").stdout, b"data of 2026\n");
}

/// Writes a new file past the page cache, again and again, until that fails.
fn write_directly(path: &Path) -> std::io::Result<()> {
    let flags = i32::try_from(OFlags::DIRECT.bits()).expect("a flag");
    let file = File::options().write(true).create_new(true).custom_flags(flags).open(path)?;
    let data = vec![7; (1 << 20) + 4096];
    let start = data.as_ptr().align_offset(4096);
    loop {
        file.write_all_at(&data[start..][..1 << 20], 0)?;
        file.sync_all()?;
    }
}

/// After a shutdown all calls fail, and nothing reaches the device. What was done before is stored.
#[test]
fn a_shutdown_ends_all_writing() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = &disks.images()[0];
    let mounted = ServedMount::new(image, "allow_other,commit=1");
    let path = |name: &str| mounted.path().join(name);
    fs::set_permissions(mounted.path(), fs::Permissions::from_mode(0o777)).expect("root may");
    fs::write(path("kept"), "before").expect("a file");
    let dir = File::open(mounted.path()).expect("the root");
    let mut open = File::create(path("open")).expect("a file");
    open.write_all(b"before").expect("data");
    assert_eq!(as_user(USER, || call::<SHUTDOWN, _>(&dir, 0_u32)), Err(Errno::PERM));
    let failed = Some(Errno::IO.raw_os_error());
    let errno = |result: std::io::Result<()>| result.map_err(|error| error.raw_os_error());
    let stored = std::thread::scope(|scope| {
        let busy = ["busy", "busier"].map(|name| {
            let path = path(name);
            scope.spawn(move || errno(write_directly(&path)))
        });
        std::thread::sleep(Duration::from_millis(300));
        call::<SHUTDOWN, _>(&dir, 0_u32).expect("root may");
        let stored = fs::read(image).expect("an image");
        for busy in busy {
            assert_eq!(busy.join().expect("no panic"), Err(failed));
        }
        stored
    });
    assert_eq!(errno(open.write_all(b"after")), Err(failed));
    assert_eq!(errno(open.sync_all()), Err(failed));
    assert_eq!(errno(fs::write(path("new"), "after")), Err(failed));
    assert_eq!(errno(fs::remove_file(path("kept"))), Err(failed));
    assert_eq!(call::<SHUTDOWN, _>(&dir, 0_u32), Err(Errno::IO), "a second time");
    // Longer than the interval between two commits.
    std::thread::sleep(Duration::from_secs(2));
    drop((dir, open));
    mounted.unmount();
    assert!(fs::read(image).expect("an image") == stored, "the image has changed");
    disks.assert_checks();
    let kernel = disks.mount("ro");
    for name in ["kept", "open"] {
        assert_eq!(fs::read(kernel.path().join(name)).expect("it is there"), b"before");
    }
    assert!(!kernel.path().join("new").exists());
}
