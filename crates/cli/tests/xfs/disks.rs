//! Volumes in partitions and images.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use offshoot_testkit::run::run;
use offshoot_testkit::xfs::judges;

use super::FewFiles;

const MIB: u64 = 1 << 20;

const PIECE_BYTES: usize = 1 << 20;

/// Copies an image to `start` of the disk `name`.
fn put(few: &FewFiles, image: &str, name: &str, start: u64) {
    let bytes = std::fs::read(few.dir().join(image)).expect("an image");
    let disk = File::options().write(true).open(few.dir().join(name)).expect("a disk");
    for (piece, at) in bytes.chunks(PIECE_BYTES).zip((start..).step_by(PIECE_BYTES)) {
        if piece.iter().any(|&byte| byte != 0) {
            disk.write_all_at(piece, at).expect("a write");
        }
    }
}

/// A disk with the XFS volume in partition 1, and room for another volume in partition 2.
fn partitioned(few: &FewFiles) {
    let path = few.dir().join("disk.img");
    File::create(&path).and_then(|file| file.set_len(800 * MIB)).expect("a disk");
    let mut sfdisk = Command::new("sfdisk");
    sfdisk.args(["--quiet".as_ref(), path.as_os_str()]).stdin(Stdio::piped());
    let mut sfdisk = sfdisk.stdout(Stdio::null()).spawn().expect("sfdisk starts");
    let script = "label: gpt\nstart=2MiB, size=512MiB, name=first\nstart=520MiB, size=256MiB\n";
    let mut input = sfdisk.stdin.take().expect("a pipe");
    input.write_all(script.as_bytes()).expect("it reads");
    drop(input);
    assert!(sfdisk.wait().expect("it ends").success());
    put(few, "v.img", "disk.img", 2 * MIB);
}

#[test]
fn a_partition_with_xfs_is_found_and_named() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    partitioned(&few);
    let is_there = |volume: &str| {
        assert_eq!(few.does(&format!("cat {volume}:/text")), "what the kernel wrote\n");
    };
    ["disk.img", "disk.img@1", "disk.img@first", "disk.img@root"].into_iter().for_each(is_there);
    assert_eq!(few.does("cat --offset 2M disk.img:/text"), "what the kernel wrote\n");
    let text = few.does("info disk.img");
    assert!(text.starts_with("layers             gpt:1 > XFS\npartitions\n"), "{text}");
    assert!(text.contains("holds XFS, labelled root\n"), "{text}");

    // With a second volume, of the other format, one has to be named.
    few.does("mkfs disk.img@2 --label second");
    let said = few.fails("ls disk.img", 2);
    assert!(said.contains("2 of its partitions hold btrfs or XFS\n"), "{said}");
    assert!(said.contains("512 MiB, holds XFS, labelled root: write disk.img@1:/\n"), "{said}");
    assert!(said.contains("holds btrfs, labelled second: write disk.img@2:/\n"), "{said}");
    ["disk.img@1", "disk.img@root"].into_iter().for_each(is_there);
    few.does("cp disk.img@root:/text disk.img@second:/");
    assert_eq!(few.does("cat disk.img@2:/text"), "what the kernel wrote\n");
}

#[test]
fn images_of_a_disk_with_xfs_are_read() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    partitioned(&few);
    let [plain, disk] = ["v.img", "disk.img"].map(|name| few.dir().join(name));
    let [image, packed] = ["v.qcow2", "disk.qcow2"].map(|name| few.dir().join(name));
    let convert = ["convert", "-O", "qcow2"].map(AsRef::as_ref);
    run("qemu-img", &[&convert[..], &[plain.as_os_str(), image.as_os_str()]].concat());
    let words = [disk.as_os_str(), packed.as_os_str()];
    run("qemu-img", &[&convert[..], &["-c".as_ref()], &words].concat());
    let stream = |volume: &str| few.does(&format!("ls -lR {volume}"));
    for volume in ["v.qcow2", "disk.qcow2", "disk.qcow2@1"] {
        assert_eq!(few.does(&format!("cat {volume}:/text")), "what the kernel wrote\n");
        assert_eq!(stream(volume), stream("v.img").replace("v.img", volume), "{volume}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&few.does("info --json disk.qcow2")).unwrap();
    assert_eq!(json["layers"], serde_json::json!(["qcow2", "gpt:1", "XFS"]));
}
