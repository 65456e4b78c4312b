//! Mounts with `-o ro,rescue=`: each word reads a volume that is damaged so that it needs the word.
//! Without it, the mount or the read fails.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_testkit::scratch_dir;
use rustix::process::Signal;

use super::damaged::{Damaged, FILE, PLAIN_FILE, extent_of, json, number, offshoot, text};
use super::{ServedMount, is_done, require, unmount, volume};

const SECTOR: usize = 4096;

/// What a file of the volume has before the damage.
fn sound(damaged: &Damaged, path: &str) -> Vec<u8> {
    let output = offshoot(&["cat", &damaged.place(path)]);
    assert!(output.status.success() && !output.stdout.is_empty(), "{output:?}");
    output.stdout
}

/// A file, read through a mount with these options.
fn read(image: &Path, options: &str, path: &str) -> Result<Vec<u8>, i32> {
    let mut mounted = ServedMount::new(image, options);
    let read = std::fs::read(mounted.path().join(path));
    let args = [mounted.path().as_os_str()];
    is_done(&args, &unmount(&args));
    // The log says what is damaged.
    assert!(mounted.wait_for_end().success(), "{}", mounted.log());
    read.map_err(|error| error.raw_os_error().unwrap_or_default())
}

/// A file has these contents in mounts with each of these values of `rescue=`.
#[track_caller]
fn require_read(damaged: &Damaged, ways: &[&str], path: &str, contents: &Vec<u8>) {
    for way in ways {
        let found = read(&damaged.image, &format!("ro,rescue={way}"), path);
        assert_eq!(found.as_ref(), Ok(contents), "{way}");
    }
}

/// The mount fails.
#[track_caller]
fn require_not_mounted(image: &Path, options: &str) {
    let dir = scratch_dir();
    let args = ["mount".as_ref(), "-o".as_ref(), OsStr::new(options), image.as_os_str()];
    let output = super::offshoot(&[&args[..], &[dir.path().as_os_str()]].concat());
    assert_eq!(output.status.code(), Some(3), "{output:?}");
}

/// Writes other bytes over the second sector of a file. Returns what it has then.
fn spoil_data(damaged: &Damaged, path: &str) -> Vec<u8> {
    let mut contents = sound(damaged, path);
    let file = File::options().write(true).open(&damaged.image).expect("the image opens");
    for at in damaged.copies(extent_of(damaged, path) + SECTOR as u64) {
        file.write_all_at(&[0xa5; 512], at).expect("it is written");
    }
    contents[SECTOR..SECTOR + 512].fill(0xa5);
    contents
}

#[test]
fn a_backup_root_is_mounted() {
    if require().is_none() {
        return;
    }
    let damaged = Damaged::new();
    let contents = sound(&damaged, FILE);
    damaged.destroy(number(&damaged.superblock["root"]));
    require_not_mounted(&damaged.image, "ro");
    require_read(&damaged, &["usebackuproot", "all"], FILE, &contents);
}

#[test]
fn data_that_does_not_fit_its_checksums_is_mounted() {
    if require().is_none() {
        return;
    }
    let damaged = Damaged::new();
    let contents = spoil_data(&damaged, PLAIN_FILE);
    assert_eq!(read(&damaged.image, "ro", PLAIN_FILE), Err(5));
    require_read(&damaged, &["ignoredatacsums", "all"], PLAIN_FILE, &contents);
}

#[test]
fn bad_roots_are_mounted_without() {
    if require().is_none() {
        return;
    }
    let damaged = Damaged::new();
    let contents = sound(&damaged, FILE);
    damaged.destroy(damaged.root_of(7));
    assert_eq!(read(&damaged.image, "ro", FILE), Err(5), "without the checksum tree");
    require_read(&damaged, &["ignorebadroots", "all"], FILE, &contents);
}

/// A log that cannot be replayed. Without it the volume is as the last commit left it.
#[test]
fn a_log_that_is_damaged_is_not_replayed() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = &disks.images()[0];
    let mounted = ServedMount::new(image, "rw");
    std::fs::write(mounted.path().join("committed"), "before").expect("a file");
    mounted.unmount();
    let mut mounted = ServedMount::new(image, "rw");
    let late = mounted.path().join("late");
    std::fs::write(&late, "after").expect("a file");
    File::open(&late).and_then(|file| file.sync_all()).expect("it is durable");
    mounted.signal(Signal::KILL);
    mounted.wait_for_end();
    drop(mounted);
    let damaged = Damaged::of(image);
    let log = number(&damaged.superblock["log_root"]);
    assert!(log > 0, "the log is pending");
    assert_eq!(read(image, "ro", "late").as_deref(), Ok(&b"after"[..]));
    damaged.destroy(log);
    require_not_mounted(image, "ro");
    for way in ["nologreplay", "all"] {
        let options = format!("ro,rescue={way}");
        assert_eq!(read(image, &options, "committed").as_deref(), Ok(&b"before"[..]), "{way}");
        assert_eq!(read(image, &options, "late"), Err(2), "{way}");
    }
}

/// Several kinds of damage need several words, or `all`.
#[test]
fn several_words_read_what_is_damaged_in_several_ways() {
    if require().is_none() {
        return;
    }
    let damaged = Damaged::new();
    let contents = spoil_data(&damaged, PLAIN_FILE);
    damaged.destroy(number(&damaged.superblock["root"]));
    require_not_mounted(&damaged.image, "ro,rescue=ignoredatacsums");
    assert_eq!(read(&damaged.image, "ro,rescue=usebackuproot", PLAIN_FILE), Err(5));
    require_read(&damaged, &["usebackuproot:ignoredatacsums", "all"], PLAIN_FILE, &contents);
    // The volume was not written.
    let super_now = &json(&["dump", "super", "--json", text(&damaged.image)])[0]["superblock"];
    assert_eq!(super_now, &damaged.superblock);
}
