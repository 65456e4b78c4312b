//! The volume in the repository.
//!
//! `fixtures/kernel.btrfs.zst` is a small volume that the Linux kernel made and filled: the system
//! of an imaginary machine with its snapshots. `fixtures/kernel.manifest` is what the kernel's
//! mount showed of it. With the two, any machine can read real input and check what it read,
//! without root and without btrfs in the kernel. [`make`] makes both files; [`unpack`] needs no
//! tool of the host.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::Path;

pub use offshoot_machine::repository;
use rustix::fs::{CWD, FileType, Mode, XattrFlags, makedev};

use crate::btrfs::disks::Disks;
use crate::btrfs::fill::data::set_compression;
use crate::btrfs::fill::subvolumes::{create, snapshot};
use crate::btrfs::fill::{directory, write};
use crate::btrfs::judges::Judges;
use crate::host::HostFilesystem;
use crate::manifest::manifest;
use crate::random::Random;

/// The size of the unpacked image: the smallest that `mkfs.btrfs` lays out as usual,
/// rounded up.
const IMAGE_MIB: u64 = 128;

/// The compressed volume, from the root of the repository.
pub const VOLUME: &str = "fixtures/kernel.btrfs.zst";

/// The manifest of what the kernel shows of it, from the root of the repository.
pub const MANIFEST: &str = "fixtures/kernel.manifest";

/// Unpacks the volume to `image`, leaving holes where it holds zeros.
///
/// # Errors
/// When the fixture cannot be read or the image cannot be written.
pub fn unpack(image: &Path) -> io::Result<()> {
    unpack_file(&repository().join(VOLUME), image)
}

/// Unpacks a file that [`pack_file`] made.
///
/// # Errors
/// Like [`unpack`].
pub fn unpack_file(packed: &Path, image: &Path) -> io::Result<()> {
    let mut plain = zstd::stream::read::Decoder::new(File::open(packed)?)?;
    let out = File::create(image)?;
    let mut piece = vec![0; 64 << 10];
    let mut offset = 0;
    loop {
        let count = read_full(&mut plain, &mut piece)?;
        if count == 0 {
            break;
        }
        if piece[..count].iter().any(|&byte| byte != 0) {
            out.write_all_at(&piece[..count], offset)?;
        }
        offset += count as u64;
    }
    out.set_len(offset)
}

/// Packs an image for the repository.
///
/// # Errors
/// When the image cannot be read or `packed` cannot be written.
pub fn pack_file(image: &Path, packed: &Path) -> io::Result<()> {
    zstd::stream::copy_encode(File::open(image)?, File::create(packed)?, 19)
}

/// Fills `buf` as far as `from` has data. Returns how many bytes that is.
fn read_full(from: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match from.read(&mut buf[done..])? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}

/// Makes the volume again and writes it and its manifest into the repository.
///
/// # Errors
/// When the files cannot be written.
pub fn make(judges: &Judges) -> io::Result<()> {
    let disks = Disks::create(judges, 1, IMAGE_MIB);
    disks.mkfs(&[
        "--label=offshoot-fixture",
        "--uuid=0ff50007-f1c7-4e5e-8a3d-000000000001",
        "--device-uuid=0ff50007-f1c7-4e5e-8a3d-000000000002",
    ]);
    let mount = disks.mount("rw,noatime");
    fill(mount.path());
    mount.sync();
    drop(mount);

    let mount = disks.mount("ro,noatime");
    let shown = HostFilesystem::new(mount.path()).and_then(|host| manifest(&host));
    let shown = shown.map_err(io::Error::other)?;
    drop(mount);

    let root = repository();
    std::fs::create_dir_all(root.join("fixtures"))?;
    std::fs::write(root.join(MANIFEST), shown)?;
    pack_file(&disks.images()[0], &root.join(VOLUME))
}

/// Fills the volume: a machine that was changed after a snapshot of it was taken.
fn fill(top: &Path) {
    let root = top.join("root");
    create(&root);
    system(&root);
    let home = top.join("home");
    create(&home);
    people(&home);
    let snapshots = directory(top, "snapshots");
    snapshot(&root, &snapshots.join("root-before-upgrade"), true);
    write(&root.join("etc/os-release"), b"NAME=\"Imaginary Linux\"\nVERSION_ID=2\n");
    write(&root.join("usr/bin/new-tool"), b"#!/bin/sh\necho new\n");
    std::fs::remove_file(root.join("usr/share/doc/zlib.txt")).expect("a file goes");
}

fn system(root: &Path) {
    for dir in ["etc", "dev", "usr", "usr/bin", "usr/share", "usr/share/doc", "srv", "var"] {
        std::fs::create_dir(root.join(dir)).expect("a directory");
    }
    write(&root.join("etc/hostname"), b"imaginary\n");
    write(&root.join("etc/os-release"), b"NAME=\"Imaginary Linux\"\nVERSION_ID=1\n");
    symlink("usr/bin", root.join("bin")).expect("a symbolic link");
    let shadow = root.join("etc/shadow");
    write(&shadow, b"root:*:20000:0:99999:7:::\n");
    std::fs::set_permissions(&shadow, PermissionsExt::from_mode(0o640)).expect("a mode");
    chown(&shadow, Some(0), Some(42)).expect("an owner");

    let doc = root.join("usr/share/doc");
    for (seed, method) in (1..).zip(["zlib", "lzo", "zstd"]) {
        let file = doc.join(format!("{method}.txt"));
        write(&file, b"");
        set_compression(&file, method);
        write(&file, &Random::new(seed).text(100_000));
    }
    write(&doc.join("plain.txt"), &Random::new(9).text(9000));

    let ping = root.join("usr/bin/ping");
    write(&ping, b"#!/bin/sh\necho pong\n");
    std::fs::set_permissions(&ping, PermissionsExt::from_mode(0o755)).expect("a mode");
    let mut capability = vec![1, 0, 0, 2, 0, 0x20];
    capability.resize(20, 0);
    set(&ping, "security.capability", &capability);
    for name in ["ping4", "ping6"] {
        std::fs::hard_link(&ping, root.join("usr/bin").join(name)).expect("a hard link");
    }

    let mode = Mode::from_raw_mode(0o666);
    rustix::fs::mknodat(CWD, root.join("dev/null"), FileType::CharacterDevice, mode, makedev(1, 3))
        .expect("a device node");
    rustix::fs::mknodat(CWD, root.join("dev/initctl"), FileType::Fifo, mode, 0).expect("a fifo");
    create(&root.join("var/cache"));
    write(&root.join("var/cache/index"), b"a subvolume in a subvolume\n");
}

fn people(home: &Path) {
    let alice = directory(home, "alice");
    write(&alice.join("notes.txt"), "Zum Fl\u{fc}sterfuchs\n".as_bytes());
    set(&alice.join("notes.txt"), "user.mime_type", b"text/plain");
    write(&alice.join("r\u{e9}sum\u{e9}.txt"), b"A name that is not ASCII.\n");
    // The access control list: user::rwx, user:1001:r-x, group::r-x, mask::r-x, other::---
    let entries =
        [(1, 7, u32::MAX), (2, 5, 1001), (4, 5, u32::MAX), (16, 5, u32::MAX), (32, 0, u32::MAX)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        list.extend_from_slice(&u16::to_le_bytes(tag));
        list.extend_from_slice(&u16::to_le_bytes(permissions));
        list.extend_from_slice(&u32::to_le_bytes(id));
    }
    let shared = directory(&alice, "shared");
    set(&shared, "system.posix_acl_access", &list);
    set(&shared, "system.posix_acl_default", &list);

    let disk = File::create(alice.join("disk.img")).expect("a file");
    disk.set_len(1 << 30).expect("a length");
    disk.write_all_at(b"a boot sector", 0).expect("data");
    disk.write_all_at(&Random::new(5).bytes(20_000), 512 << 20).expect("data");
    for path in [&alice, &alice.join("notes.txt"), &shared, &alice.join("disk.img")] {
        chown(path, Some(1000), Some(1000)).expect("an owner");
    }
}

fn set(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::setxattr(path, name, value, XattrFlags::empty())
        .unwrap_or_else(|error| panic!("{name} of {}: {error}", path.display()));
}
