//! Disk images: hostile ones, and those of other programs.

mod bodies;
mod qemu;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use offshoot_device::{FileDevice, ImageKind, open_image};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_or};
use qemu::{made, qemu_io};

/// The file at `path`, compressed by each of the programs.
fn streams(path: &Path) -> Vec<Vec<u8>> {
    let stream = |program: &&str| {
        let output = Command::new(program).args(["-1", "-c"]).arg(path).output();
        let output = output.expect("it runs; `cargo xtask setup` installs it");
        assert!(output.status.success(), "{program}: {}", output.status);
        output.stdout
    };
    ["gzip", "xz", "zstd"].iter().map(stream).collect()
}

/// Seeded mutations of small images of every kind; the fuzz target makes the same ones.
#[test]
fn hostile_images() {
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    made(dir.path(), "qcow2", "", "-o cluster_size=512");
    let mut images = streams(&dir.path().join("made"));
    for (format, options) in [
        ("qcow2", ""),
        ("qcow2", "-c"),
        ("qcow2", "-o cluster_size=512"),
        ("qcow2", "-o extended_l2=on,cluster_size=16k"),
        ("qcow2", "-c -o compression_type=zstd"),
        ("vdi", ""),
        ("vpc", ""),
        ("vhdx", "-o block_size=1M"),
        ("vmdk", ""),
        ("vmdk", "-o subformat=streamOptimized"),
        ("vmdk", "-o subformat=monolithicFlat"),
        ("vmdk", "-o subformat=twoGbMaxExtentSparse"),
    ] {
        images.push(made(dir.path(), format, "", options));
    }
    let mut random = Random::new(seed_or(0x696d_6167));
    for image in images {
        bodies::image(&image);
        for _ in 0..40 {
            let mut bytes = image.clone();
            for _ in 0..=random.below(4) {
                // Mostly in the first 1024 bytes, where the header is.
                let most = if random.below(3) == 0 { bytes.len() as u64 } else { 1024 };
                let at = usize::try_from(random.below(most.min(bytes.len() as u64)));
                let which = usize::try_from(random.below(4)).expect("small");
                let value = [0, 0xff, 1, random.bytes(1)[0]][which];
                bytes[at.expect("small")] = value;
            }
            if random.below(4) == 0 {
                bytes.truncate(usize::try_from(random.below(bytes.len() as u64)).expect("small"));
            }
            bodies::image(&bytes);
        }
    }
}

/// The table of this VHDX has entries for bitmaps: with blocks of the largest size there is one for
/// every 4 GiB. The test damages the older header, then marks the log of the newer one as not
/// replayed, and then damages the newer header too.
#[test]
fn a_large_vhdx_is_read_by_the_header_that_is_whole() {
    const MIB: u64 = 1 << 20;
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("disk.vhdx");
    let name = path.to_str().expect("text");
    let words = ["create", "-q", "-f", "vhdx", "-o", "block_size=256M", name, "40G"];
    let made = Command::new("qemu-img").args(words).status().expect("it runs");
    assert!(made.success());
    // Just before and behind the entries of bitmaps, and at the end of the disk.
    let places = [0, 4095, 4096, 4097, 8191, 8192, 20_480, 40_959].map(|mib| mib * MIB);
    let write = |at: &u64| format!("write -P {} {at} 4k", 1 + at / MIB % 251);
    qemu_io(&path, "vhdx", &places.iter().map(write).collect::<Vec<_>>());
    let opens = || {
        let file = FileDevice::open(&path).expect("it opens");
        open_image(Arc::new(file), ImageKind::Vhdx)
    };
    let is_right = || {
        let disk = opens().expect("it is whole");
        assert_eq!(disk.size_bytes(), 40 << 30);
        for at in places {
            let mut found = [0; 8192];
            disk.read_at(at, &mut found).expect("it is read");
            let expected = u8::try_from(1 + at / MIB % 251).expect("small");
            assert!(found[..4096] == [expected; 4096] && found[4096..] == [0; 4096], "{at}");
        }
    };
    is_right();
    let file = File::options().read(true).write(true).open(&path).expect("a file");
    let sequence = |at: u64| {
        let mut number = [0; 8];
        file.read_exact_at(&mut number, at + 8).expect("a header");
        u64::from_le_bytes(number)
    };
    // A reader needs neither the older header nor the first table of regions.
    let headers = [64 << 10, 128 << 10];
    let [newer, older] = if sequence(headers[0]) > sequence(headers[1]) {
        headers
    } else {
        [headers[1], headers[0]]
    };
    for at in [older, 192 << 10] {
        file.write_all_at(&[7; 8], at + 20).expect("it is written");
    }
    is_right();
    let mut header = [0; 4096];
    file.read_exact_at(&mut header, newer).expect("a header");
    header[48..64].fill(7);
    header[4..8].fill(0);
    let sum = crc32c::crc32c(&header).to_le_bytes();
    header[4..8].copy_from_slice(&sum);
    file.write_all_at(&header, newer).expect("it is written");
    let error = opens().expect_err("it was not closed").to_string();
    assert!(error.contains("its log has to be replayed"), "{error}");
    header[4] ^= 1;
    file.write_all_at(&header, newer).expect("it is written");
    let error = opens().expect_err("both are damaged").to_string();
    assert!(error.contains("both of its headers"), "{error}");
}
