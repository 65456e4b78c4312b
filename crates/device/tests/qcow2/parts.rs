//! Reads parts of clusters that QEMU stored.

use std::fs::File;
use std::process::Command;
use std::sync::Arc;

use offshoot_device::{BlockDevice, FileDevice, Qcow2Header, Qcow2Options, open_qcow2};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::scratch_dir;

use super::qemu::qemu_io;

/// Parts of clusters are stored, zeros, compressed, discarded or in the backing file. The disk and
/// a snapshot of it show the same bytes as QEMU does.
#[test]
fn what_qemu_stored_in_parts_of_clusters_is_read() {
    const DISK_BYTES: u64 = 4 << 20;
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let run = |words: &[&str]| {
        let mut command = Command::new("qemu-img");
        let output = command.args(words).current_dir(dir.path()).output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    // The backing file is shorter than the disk above it.
    let base = random.bytes(usize::try_from(DISK_BYTES - 300_000).expect("small"));
    std::fs::write(dir.path().join("base"), &base).expect("a file");
    run(&["convert", "-O", "qcow2", "-f", "raw", "base", "base.qcow2"]);
    let path = dir.path().join("top");
    for options in [
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k,compression_type=zstd",
        "compression_type=zstd",
    ] {
        let _ = std::fs::remove_file(&path);
        let base = ["-b", "base", "-F", "raw", "-o", options];
        run(&[&["create", "-q", "-f", "qcow2"], &base[..], &["top", "4M"]].concat());
        let mut commands = |count: u64| -> Vec<String> {
            let one = |_| {
                let len = (1 + random.below(80)) * 1024;
                let at = random.below((DISK_BYTES - len) / 512) * 512;
                match random.below(4) {
                    0 => format!("write -z {at} {len}"),
                    1 => format!("discard {at} {len}"),
                    _ => format!("write -P {} {at} {len}", 1 + at % 250),
                }
            };
            (0..count).map(one).collect()
        };
        // QEMU compresses only clusters that are not stored yet.
        let packed = (0..DISK_BYTES >> 16).step_by(3);
        let packed = packed.map(|at| format!("write -c -P {} {} 64k", 1 + at, at << 16));
        qemu_io(&path, "qcow2", &packed.collect::<Vec<_>>());
        qemu_io(&path, "qcow2", &commands(20));
        run(&["snapshot", "-c", "kept", "top"]);
        run(&["convert", "-O", "raw", "top", "kept"]);
        qemu_io(&path, "qcow2", &commands(20));
        run(&["convert", "-O", "raw", "top", "now"]);
        let file = Arc::new(FileDevice::open(&path).expect("it opens"));
        let header = Qcow2Header::read(&*file).expect("a header");
        let opens =
            |name: &str| Arc::new(FileDevice::open(&dir.path().join(name)).expect("it opens"));
        let packed = opens("base.qcow2");
        let packed_header = Qcow2Header::read(&*packed).expect("a header");
        let packed = open_qcow2(packed, &packed_header, Qcow2Options::default());
        let bases: [Arc<dyn BlockDevice>; 2] = [opens("base"), packed.expect("it opens")];
        let kept = header.snapshot("kept").cloned();
        for (base, name, snapshot) in
            [(0, "now", None), (0, "kept", kept.clone()), (1, "now", None), (1, "kept", kept)]
        {
            let backing = Some(bases[base].clone());
            let options = Qcow2Options { is_writable: false, backing, snapshot };
            let disk = open_qcow2(file.clone(), &header, options).expect("it opens");
            let expected = std::fs::read(dir.path().join(name)).expect("a file");
            assert_eq!(disk.size_bytes(), expected.len() as u64);
            let mut found = vec![1; expected.len()];
            disk.read_at(0, &mut found).expect("it is read");
            let differs = (0..found.len()).find(|&at| found[at] != expected[at]);
            assert_eq!(differs, None, "seed {seed}, {name}");
        }
        // The image file is cut off. A read of the lost part must fail, and not show the backing
        // file.
        let len = file.size_bytes();
        File::options()
            .write(true)
            .open(&path)
            .expect("a file")
            .set_len(len / 2)
            .expect("it is cut");
        let cut: Arc<dyn BlockDevice> = opens("top");
        let options = Qcow2Options { backing: Some(bases[0].clone()), ..Qcow2Options::default() };
        open_qcow2(cut, &header, options)
            .and_then(|disk| {
                disk.read_at(0, &mut vec![0; usize::try_from(DISK_BYTES).expect("small")])
            })
            .expect_err("it is cut");
    }
}
