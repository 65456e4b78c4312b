//! Disk images that `qemu-img` made of a disk that the kernel filled.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Stdio;

use offshoot_testkit::btrfs::disks::AttachedImages;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::run;

use super::{KernelImage, MIB, VOLUME_BYTES, pipe};

/// The offset of the volume on the disk.
const START: u64 = 3 * MIB;

impl KernelImage {
    pub(crate) fn qemu_img(&self, words: &[&str]) -> String {
        // File names among the words are relative to the directory.
        let output = std::process::Command::new("qemu-img")
            .args(words)
            .current_dir(&self.dir)
            .output()
            .expect("qemu-img runs; `cargo xtask setup` installs it");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "qemu-img {words:?}: {}\n{said}", output.status);
        String::from_utf8(output.stdout).expect("text")
    }

    /// A disk, `disk.img`, with a GPT and the volume in partition 1.
    fn disk(&self) {
        let size = START + VOLUME_BYTES + MIB;
        self.partitioned("disk.img", size, "label: gpt\nstart=3MiB, size=128MiB, name=root\n");
        self.put_volume("disk.img", START);
    }

    /// Copies a file into `image`, copies within it, and removes files. The kernel then shows the
    /// result. `big` has the contents of the file `big`, and messages describe the image with
    /// `what`.
    fn edit(&self, image: &str, big: &[u8], what: &str) {
        let place = |path: &str| format!("{image}{path}");
        self.does(&["cp", "big", &place(":/big")]);
        self.does(&["cp", "-r", &place(":/text"), &place("@1:/again")]);
        self.does(&["rm", &place(":/text")]);
        self.judge(image);
        {
            let mount = self.disks.mount("ro");
            let read = |name| std::fs::read(mount.path().join(name)).expect("it is there");
            assert!(read("big") == big, "{what}");
            assert_eq!(read("again"), b"what the kernel wrote\n");
        }
        self.does(&["rm", &place(":/big")]);
    }

    /// Requires that `qemu-img` finds no error and no leak in the image, and converts it. `btrfs
    /// check` must find nothing in the result. The kernel can mount the volume afterwards.
    #[track_caller]
    fn judge(&self, image: &str) {
        self.qemu_img(&["check", image]);
        self.qemu_img(&["convert", "-O", "raw", image, "judged.img"]);
        self.take_volume("judged.img", START);
        self.disks.assert_checks();
    }
}

#[test]
fn images_of_every_kind_are_read() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    let kinds: [(&str, &str, &[&str]); 25] = [
        ("qcow2", "qcow2", &[]),
        ("qcow2", "qcow2", &["-c"]),
        ("qcow2", "qcow2", &["-o", "compat=0.10"]),
        ("qcow2", "qcow2", &["-c", "-o", "compat=0.10,cluster_size=4k"]),
        ("qcow2", "qcow2", &["-o", "cluster_size=2M,refcount_bits=1"]),
        ("qcow2", "qcow2", &["-o", "lazy_refcounts=on,preallocation=metadata"]),
        ("qcow2", "qcow2", &["-o", "extended_l2=on"]),
        ("qcow2", "qcow2", &["-c", "-o", "extended_l2=on,cluster_size=2M"]),
        ("qcow2", "qcow2", &["-c", "-o", "compression_type=zstd"]),
        ("qcow2", "qcow2", &["-c", "-o", "compression_type=zstd,cluster_size=4k"]),
        ("qcow2", "qcow2", &["-c", "-o", "compression_type=zstd,extended_l2=on,cluster_size=16k"]),
        ("vdi", "vdi", &[]),
        ("vdi", "vdi", &["-o", "static=on"]),
        ("vhd", "vpc", &["-o", "force_size=on"]),
        ("vhd", "vpc", &["-o", "subformat=fixed,force_size=on"]),
        ("vhdx", "vhdx", &[]),
        ("vhdx", "vhdx", &["-o", "subformat=fixed"]),
        ("vhdx", "vhdx", &["-o", "block_size=1M,log_size=2M"]),
        ("vmdk", "vmdk", &[]),
        ("vmdk", "vmdk", &["-o", "subformat=streamOptimized"]),
        ("vmdk", "vmdk", &["-o", "zeroed_grain=on"]),
        ("vmdk", "vmdk", &["-o", "adapter_type=lsilogic"]),
        ("vmdk", "vmdk", &["-o", "subformat=monolithicFlat"]),
        ("vmdk", "vmdk", &["-o", "subformat=twoGbMaxExtentFlat"]),
        ("vmdk", "vmdk", &["-o", "subformat=twoGbMaxExtentSparse"]),
    ];
    for (name, format, options) in kinds {
        let _ = std::fs::remove_file(bench.path("made"));
        bench.qemu_img(&[&["convert", "-O", format], options, &["disk.img", "made"]].concat());
        bench.is_same(&["made"]);
        let text = bench.does(&["info", "made@root"]);
        let layers = format!("layers             {name} > gpt:1 > btrfs\n");
        assert!(text.starts_with(&layers), "{name} {options:?}: {text}");
    }
    for (name, program, words) in [
        ("gzip", "gzip", &["-1", "-k"][..]),
        ("xz", "xz", &["-0", "-k", "-T2"]),
        ("zstd", "zstd", &["-q"]),
    ] {
        let path = bench.path("disk.img");
        let end = if name == "gzip" {
            "gz"
        } else if name == "xz" {
            "xz"
        } else {
            "zst"
        };
        let words: Vec<_> = words.iter().map(std::ffi::OsStr::new).collect();
        run(program, &[&words[..], &[path.as_os_str()]].concat());
        bench.is_same(&[&format!("disk.img.{end}")]);
        let said = bench.fails(&["mkdir", &format!("disk.img.{end}:/x")], 1);
        assert!(said.contains(&format!("{name} is only read here")), "{said}");
    }
    // `pzstd` packs frames with several threads. Each frame follows a small one with its length.
    let packed = ["-q".as_ref(), "-p".as_ref(), "2".as_ref(), "-o".as_ref()];
    let names = [bench.path("threads.zst"), bench.path("disk.img")];
    run("pzstd", &[&packed[..], &[names[0].as_os_str(), names[1].as_os_str()]].concat());
    bench.is_same(&["threads.zst"]);
    // An image in a compressed stream.
    bench.qemu_img(&["convert", "-O", "qcow2", "disk.img", "in.qcow2"]);
    run("zstd", &["-q".as_ref(), bench.path("in.qcow2").as_os_str()]);
    bench.is_same(&["in.qcow2.zst"]);
    assert!(bench.does(&["info", "in.qcow2.zst"]).contains("zstd > qcow2 > gpt:1 > btrfs\n"));
}

/// An image that we do not read is refused, with a command that converts it.
#[test]
fn what_is_not_read_is_refused_by_name() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    bench.qemu_img(&["convert", "-O", "qcow2", "-o", "data_file=data", "disk.img", "made"]);
    let said = bench.fails(&["ls", "made:/"], 1);
    let what = "its data in another file";
    assert!(said.contains(what) && said.contains("qemu-img convert -O qcow2"), "{said}");
    // The command in the error works.
    bench.qemu_img(&["convert", "-O", "qcow2", "made", "out"]);
    bench.is_same(&["out"]);
    // One file of an image that has several.
    let split = ["-o", "subformat=twoGbMaxExtentSparse"];
    bench.qemu_img(&[&["convert", "-O", "vmdk"], &split[..], &["disk.img", "two.vmdk"]].concat());
    let said = bench.fails(&["ls", "two-s001.vmdk:/"], 1);
    assert!(said.contains("it is one of the files of a VMDK"), "{said}");
    bench.qemu_img(&["convert", "-O", "vmdk", "disk.img", "base.vmdk"]);
    bench.qemu_img(&["create", "-q", "-f", "vmdk", "-b", "base.vmdk", "-F", "vmdk", "top.vmdk"]);
    let said = bench.fails(&["ls", "top.vmdk:/"], 1);
    assert!(said.contains("a VMDK that needs other files is not read here"), "{said}");
    bench.qemu_img(&["convert", "-O", "qcow2", "top.vmdk", "out"]);
    bench.is_same(&["out"]);
    // An encrypted image, and version 1. The test leaves out LUKS: making one measures the speed of
    // this machine first, and that fails on a busy one.
    std::fs::write(bench.path("PASSWORD_FILE"), "secret").expect("a file");
    let secret = ["--object", "secret,id=key,file=PASSWORD_FILE"];
    let encrypt = ["-O", "qcow2", "-o", "encrypt.format=aes,encrypt.key-secret=key"];
    let words = [&["convert"], &secret[..], &encrypt, &["disk.img", "IN"]].concat();
    bench.qemu_img(&words);
    let said = bench.fails(&["ls", "IN:/"], 1);
    let way = "driver=qcow2,encrypt.key-secret=key,file.filename=IN";
    assert!(
        said.contains("a qcow2 with encryption is not read here") && said.contains(way),
        "{said}"
    );
    let words = [&["convert"], &secret[..], &["--image-opts", way, "-O", "qcow2", "OUT"]].concat();
    bench.qemu_img(&words);
    bench.is_same(&["OUT"]);
    bench.qemu_img(&["convert", "-O", "qcow", "disk.img", "made"]);
    let said = bench.fails(&["ls", "made:/"], 1);
    assert!(said.contains("no version 1 of qcow2 is known: qemu-img convert"), "{said}");
    bench.qemu_img(&["convert", "-O", "vdi", "disk.img", "disk.vdi"]);
    let said = bench.fails(&["mkdir", "disk.vdi:/x"], 1);
    assert!(said.contains("vdi is only read here"), "{said}");
    let stream = ["-o", "subformat=streamOptimized"];
    bench.qemu_img(&[&["convert", "-O", "vmdk"], &stream[..], &["disk.img", "s.vmdk"]].concat());
    let said = bench.fails(&["mkdir", "s.vmdk:/x"], 1);
    let expected = "a stream-optimised VMDK is only read here, and not written: qemu-img convert";
    assert!(said.contains(expected), "{said}");
    bench.qemu_img(&["convert", "-O", "qcow2", "disk.img", "disk.qcow2"]);
    let said = bench.fails(&["mkfs", "disk.qcow2", "--size", "1G"], 1);
    assert!(said.contains("is an image (qcow2)"), "{said}");
}

#[test]
fn a_qcow2_is_written() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    let big: Vec<u8> = (0..6 << 20).map(|at: u32| (at / 7).to_le_bytes()[0]).collect();
    std::fs::write(bench.path("big"), &big).expect("a file");
    for options in [
        &[][..],
        &["-c"],
        &["-o", "compat=0.10"],
        &["-c", "-o", "cluster_size=4k"],
        &["-o", "extended_l2=on"],
        &["-c", "-o", "extended_l2=on,cluster_size=16k,compression_type=zstd"],
        &["-c", "-o", "compression_type=zstd,refcount_bits=64"],
        &["-o", "preallocation=metadata,lazy_refcounts=on"],
    ] {
        let _ = std::fs::remove_file(bench.path("made"));
        bench.qemu_img(&[&["convert", "-O", "qcow2"], options, &["disk.img", "made"]].concat());
        bench.edit("made", &big, &options.join(" "));
        let used = || bench.path("made").metadata().expect("it is there").blocks();
        let before = used();
        bench.does(&["trim", "made"]);
        let freed = before.saturating_sub(used()) * 512;
        assert!(freed > 4 * MIB, "{options:?}: trimming freed {freed} bytes of the host");
        bench.judge("made");
    }
    // A volume that is made in an empty image.
    for options in ["compat=1.1", "extended_l2=on,cluster_size=128k"] {
        let _ = std::fs::remove_file(bench.path("new.qcow2"));
        bench.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "new.qcow2", "200M"]);
        bench.does(&["mkfs", "new.qcow2"]);
        bench.does(&["cp", "big", "new.qcow2:/big"]);
        bench.qemu_img(&["check", "new.qcow2"]);
        let used = bench.path("new.qcow2").metadata().expect("it is there").len();
        assert!(used < 40 * MIB, "an image of few bytes became {used} bytes long");
        bench.qemu_img(&["convert", "-O", "raw", "new.qcow2", "new.img"]);
        offshoot_testkit::btrfs::disks::assert_image_checks(&bench.path("new.img"));
    }
}

#[test]
fn a_vmdk_is_written() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    let big: Vec<u8> = (0..6 << 20).map(|at: u32| (at / 7).to_le_bytes()[0]).collect();
    std::fs::write(bench.path("big"), &big).expect("a file");
    for options in [
        "subformat=monolithicSparse",
        "subformat=monolithicSparse,zeroed_grain=on",
        "subformat=monolithicFlat",
        "subformat=twoGbMaxExtentFlat",
        "subformat=twoGbMaxExtentSparse",
    ] {
        let _ = std::fs::remove_file(bench.path("made.vmdk"));
        let words = ["convert", "-O", "vmdk", "-o", options, "disk.img", "made.vmdk"];
        bench.qemu_img(&words);
        bench.edit("made.vmdk", &big, options);
        bench.does(&["trim", "made.vmdk"]);
        bench.judge("made.vmdk");
        bench.does(&["ls", "--image-format", "vmdk", "made.vmdk:/"]);
    }
    bench.qemu_img(&["create", "-q", "-f", "vmdk", "new.vmdk", "200M"]);
    bench.does(&["mkfs", "new.vmdk"]);
    bench.does(&["cp", "big", "new.vmdk:/big"]);
    bench.qemu_img(&["check", "new.vmdk"]);
    let used = bench.path("new.vmdk").metadata().expect("it is there").len();
    assert!(used < 40 * MIB, "an image of few bytes became {used} bytes long");
    bench.qemu_img(&["convert", "-O", "raw", "new.vmdk", "new.img"]);
    offshoot_testkit::btrfs::disks::assert_image_checks(&bench.path("new.img"));
    // The process that serves a mount may not open files or change their sizes. The image still
    // grows.
    std::fs::create_dir(bench.path("mounted")).expect("a directory");
    bench.does(&["mount", "new.vmdk", "mounted"]);
    let mounted = UnmountGuard(&bench);
    std::fs::write(bench.path("mounted/more"), &big).expect("a write");
    drop(mounted);
    bench.qemu_img(&["check", "new.vmdk"]);
    bench.qemu_img(&["convert", "-O", "raw", "new.vmdk", "new.img"]);
    offshoot_testkit::btrfs::disks::assert_image_checks(&bench.path("new.img"));
    // A block device cannot grow, whether it holds the whole image or one extent.
    let extent = "subformat=twoGbMaxExtentSparse";
    bench.qemu_img(&["convert", "-O", "vmdk", "-o", extent, "disk.img", "two.vmdk"]);
    let text = std::fs::read_to_string(bench.path("two.vmdk")).expect("a descriptor");
    let attached = AttachedImages::new(&[bench.path("new.vmdk"), bench.path("two-s001.vmdk")]);
    let [whole, part] = attached.devices()[..] else { panic!("two devices") };
    std::fs::write(bench.path("two.vmdk"), text.replace("two-s001.vmdk", part)).expect("a file");
    for image in [whole, "two.vmdk"] {
        bench.does(&["ls", "--backing", &format!("{image}:/")]);
        let said = bench.fails(&["mkdir", "--backing", &format!("{image}:/dir")], 1);
        let what = "a sparse VMDK on a block device cannot become longer, so it is not written";
        assert!(said.contains(what) && said.contains("copy it into a file (cp "), "{said}");
    }
}

/// A descriptor may name plain files beside it. Other files need `--backing` on the command line.
#[test]
fn files_that_a_descriptor_names_are_opened_with_care() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    let flat = ["convert", "-O", "vmdk", "-o", "subformat=monolithicFlat", "disk.img", "a.vmdk"];
    bench.qemu_img(&flat);
    let text = std::fs::read_to_string(bench.path("a.vmdk")).expect("a descriptor");
    let named = |name: &str| {
        std::fs::write(bench.path("a.vmdk"), text.replace("a-flat.vmdk", name)).expect("a file");
    };
    std::fs::create_dir(bench.path("dir")).expect("a directory");
    std::fs::rename(bench.path("a-flat.vmdk"), bench.path("dir/data")).expect("it is moved");
    std::os::unix::fs::symlink("dir/data", bench.path("link")).expect("a link");
    let whole = bench.path("dir/data").display().to_string();
    for name in ["dir/data", "./dir/data", "dir/../dir/data", "link", &whole] {
        named(name);
        for words in [["ls", "a.vmdk:/"], ["mkdir", "a.vmdk:/new"]] {
            let said = bench.fails(&words, 1);
            let expected = format!("its data is in {name}, which is no plain file beside it");
            assert!(said.contains(&expected) && said.contains("--backing"), "{said}");
        }
        bench.is_same(&["--backing", "a.vmdk"]);
    }
    named("gone");
    for backing in [&[][..], &["--backing"]] {
        let said = bench.fails(&[&["ls", "a.vmdk:/"], backing].concat(), 1);
        assert!(said.contains("a.vmdk: its data is in gone, which is not there"), "{said}");
    }
    // A character device, and the descriptor itself.
    named("/dev/zero");
    let said = bench.fails(&["ls", "--backing", "a.vmdk:/"], 1);
    assert!(said.contains("neither a regular file nor a block device"), "{said}");
    named("a.vmdk");
    let said = bench.fails(&["ls", "a.vmdk:/"], 1);
    assert!(said.contains("its data is in a.vmdk, which is the descriptor itself, or"), "{said}");
    // A raw disk that begins like a descriptor. A guest can write such a beginning on its own disk.
    let raw = File::options().write(true).open(bench.path("raw.img")).expect("an image");
    raw.write_all_at(text.replace("a-flat.vmdk", "disk.img").as_bytes(), 0).expect("a write");
    let said = bench.fails(&["ls", "raw.img:/"], 1);
    assert!(said.contains("too large for one") && said.contains("--image-format raw"), "{said}");
    bench.is_same(&["--image-format", "raw", "raw.img"]);
    // A file that QEMU has open, and copies onto files that are open.
    std::fs::rename(bench.path("dir/data"), bench.path("data")).expect("it is moved");
    named("data");
    bench.is_same(&["a.vmdk"]);
    // One file under two names.
    std::fs::hard_link(bench.path("data"), bench.path("second")).expect("a link");
    named("data\" 0\nRW 8 FLAT \"second");
    let said = bench.fails(&["ls", "a.vmdk:/"], 1);
    let expected = "its data is in second, which is the descriptor itself, or another name of";
    assert!(said.contains(expected), "{said}");
    // A read-only part is not opened for writing, so other readers may hold it.
    let tail = File::create_new(bench.path("tail")).expect("a file");
    tail.set_len(MIB).and_then(|()| tail.lock_shared()).expect("a file");
    named("data\" 0\nRDONLY 2048 FLAT \"tail");
    bench.does(&["mkdir", "a.vmdk:/beside"]);
    named("data\" 0\nRW 2048 FLAT \"tail");
    let said = bench.fails(&["mkdir", "a.vmdk:/new"], 1);
    assert!(said.contains("tail: in use by"), "{said}");
    named("data");
    let mut command = std::process::Command::new("qemu-io");
    command.args(["-f", "vmdk", "a.vmdk"]).current_dir(&bench.dir);
    let mut qemu = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    writeln!(qemu.stdin.as_ref().expect("a pipe"), "length").expect("it reads");
    let len = qemu.stdout.as_mut().expect("a pipe").read(&mut [0; 16]).expect("it answers");
    assert!(len > 0, "qemu-io ends");
    let said = bench.fails(&["mkdir", "a.vmdk:/new"], 1);
    assert!(said.contains(&format!("in use by process {} (qemu-io)", qemu.id())), "{said}");
    drop(qemu.stdin.take());
    qemu.wait().expect("it ends");
    std::fs::create_dir(bench.path("from")).expect("a directory");
    std::fs::write(bench.path("from/data"), "text").expect("a file");
    bench.does(&["cp", "-r", "from", "a.vmdk:/from"]);
    let before = std::fs::read(bench.path("data")).expect("a file");
    bench.fails(&["cp", "-r", "-f", "a.vmdk:/from/.", "."], 1);
    assert!(before == std::fs::read(bench.path("data")).expect("a file"), "it was written over");
}

/// A seekable stream is read in place, without unpacking it to a file.
#[test]
fn a_seekable_stream_is_read_without_a_file() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    let file = File::create(bench.path("disk.zst")).expect("a file");
    let mut encoder = zeekstd::Encoder::new(file).expect("an encoder");
    let mut disk = File::open(bench.path("disk.img")).expect("a file");
    std::io::copy(&mut disk, &mut encoder).expect("it is packed");
    encoder.finish().expect("it ends");
    run("zstd", &["-q".as_ref(), "-t".as_ref(), bench.path("disk.zst").as_os_str()]);
    bench.is_same(&["disk.zst"]);
    run("zstd", &["-q".as_ref(), bench.path("disk.img").as_os_str()]);
    for (image, expected) in [("disk.zst", "what the kernel wrote\n"), ("disk.img.zst", "")] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_offshoot"));
        command.args(["cat", &format!("{image}:/text")]).current_dir(&bench.dir);
        let output = command.env("TMPDIR", "/nowhere").output().expect("it runs");
        assert_eq!(output.stdout, expected.as_bytes(), "{image}: {output:?}");
    }
    assert!(bench.does(&["info", "disk.zst"]).contains("zstd > gpt:1 > btrfs\n"));
}

#[test]
fn backing_files_are_opened_when_asked_for() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    bench.qemu_img(&["convert", "-c", "-O", "qcow2", "disk.img", "base.qcow2"]);
    let create = |name, backing, format| {
        bench.qemu_img(&["create", "-q", "-f", "qcow2", "-b", backing, "-F", format, name]);
    };
    create("middle.qcow2", "base.qcow2", "qcow2");
    create("top.qcow2", "middle.qcow2", "qcow2");
    create("plain.qcow2", "disk.img", "raw");
    let said = bench.fails(&["ls", "top.qcow2"], 1);
    assert!(said.contains("it needs its backing file middle.qcow2"), "{said}");
    bench.is_same(&["--backing", "top.qcow2"]);
    bench.is_same(&["--backing", "plain.qcow2"]);
    let base = std::fs::read(bench.path("base.qcow2")).expect("a file");
    bench.does(&["cp", "--backing", "raw.img:/text", "top.qcow2:/new"]);
    bench.does(&["rm", "--backing", "top.qcow2:/text"]);
    bench.judge("top.qcow2");
    let mount = bench.disks.mount("ro");
    let new = std::fs::read(mount.path().join("new")).expect("it is there");
    assert_eq!(new, b"what the kernel wrote\n");
    assert!(std::fs::read(bench.path("base.qcow2")).expect("a file") == base, "the base changed");
    // A backing file that is declared raw is not probed. It is a qcow2, and has no disk in it.
    create("wrong.qcow2", "base.qcow2", "raw");
    bench.fails(&["ls", "--backing", "wrong.qcow2"], 1);
    // Backing files in a loop.
    create("one.qcow2", "base.qcow2", "qcow2");
    create("two.qcow2", "one.qcow2", "qcow2");
    bench.qemu_img(&["rebase", "-u", "-f", "qcow2", "-b", "two.qcow2", "-F", "qcow2", "one.qcow2"]);
    let said = bench.fails(&["ls", "--backing", "two.qcow2"], 1);
    assert!(said.contains("in a loop"), "{said}");
}

/// A copy onto files of the host does not overwrite the backing files of open images.
#[test]
fn backing_files_are_spared_by_copies() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    for (name, backing, format) in
        [("middle.qcow2", "disk.img", "raw"), ("top.qcow2", "middle.qcow2", "qcow2")]
    {
        bench.qemu_img(&["create", "-q", "-f", "qcow2", "-b", backing, "-F", format, name]);
    }
    let names = ["disk.img", "middle.qcow2", "top.qcow2"];
    let before = names.map(|name| std::fs::read(bench.path(name)).expect("a file"));
    let text = "what the kernel wrote\n";
    for name in names {
        std::fs::create_dir_all(bench.path("from")).expect("a directory");
        std::fs::write(bench.path("from").join(name), text).expect("a file");
    }
    bench.does(&["cp", "--backing", "-r", "from", "top.qcow2:/from"]);
    let before =
        [&before[..2], &[std::fs::read(bench.path("top.qcow2")).expect("a file")]].concat();
    for force in [&[][..], &["-f"]] {
        let words = [&["cp", "--backing", "-r"], force, &["top.qcow2:/from/.", "."]].concat();
        let output = bench.offshoot(&words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let after = names.map(|name| std::fs::read(bench.path(name)).expect("a file"));
        assert!(before == after, "{words:?} wrote over an image: {said}");
    }
}

/// A writer and QEMU lock each other out of an image and of its backing files.
#[test]
fn qemu_and_a_writer_keep_each_other_away() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    bench.qemu_img(&["convert", "-O", "qcow2", "disk.img", "base.qcow2"]);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top"]);
    let opened = |words: &[&str]| {
        let mut command = std::process::Command::new("qemu-io");
        command.args(words).current_dir(&bench.dir);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
        writeln!(child.stdin.as_ref().expect("a pipe"), "length").expect("it reads");
        let mut answer = [0; 16];
        let len = child.stdout.as_mut().expect("a pipe").read(&mut answer).expect("it answers");
        assert!(len > 0, "{words:?} ends");
        child
    };
    for (words, volume) in [
        // A machine runs, another one runs on the same base, and one runs on the base itself.
        (&["-f", "qcow2", "top"][..], "top:/dir"),
        (&["-f", "qcow2", "top"], "base.qcow2:/dir"),
        (&["-f", "qcow2", "base.qcow2"], "top:/dir"),
    ] {
        let mut qemu = opened(words);
        let said = bench.fails(&["mkdir", "--backing", volume], 1);
        assert!(said.contains(&format!("in use by process {} (qemu-io)", qemu.id())), "{said}");
        bench.does(&["ls", "--backing", "top:/"]);
        drop(qemu.stdin.take());
        qemu.wait().expect("it ends");
    }
    let dir = bench.path("mounted");
    std::fs::create_dir(&dir).expect("a directory");
    bench.does(&["mount", "--backing", "top", "mounted"]);
    let mounted = UnmountGuard(&bench);
    for words in [
        &["-f", "qcow2", "-c", "write 0 512", "top"][..],
        &["-f", "qcow2", "-c", "write 0 512", "base.qcow2"],
    ] {
        let output =
            std::process::Command::new("qemu-io").args(words).current_dir(&bench.dir).output();
        let said = String::from_utf8(output.expect("it runs").stderr).expect("text");
        assert!(said.contains("lock"), "{words:?}: {said}");
    }
    drop(mounted);
    bench.does(&["mkdir", "--backing", "top:/dir"]);
    bench.judge("top");
}

/// A file that looks like an image is a raw disk if the command line says so.
#[test]
fn the_format_of_a_file_can_be_said() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    // btrfs does not use the first bytes of a volume, so a guest may write an image header there.
    let raw = File::options().write(true).open(bench.path("raw.img")).expect("an image");
    raw.write_all_at(b"QFI\xfb\0\0\0\x03", 0).expect("a write");
    bench.fails(&["ls", "raw.img:/"], 1);
    bench.is_same(&["--image-format", "raw", "raw.img"]);
    std::fs::write(bench.path("new"), "new\n").expect("a file");
    bench.does(&["cp", "--image-format", "raw", "new", "raw.img:/new"]);
    assert_eq!(bench.does(&["cat", "--image-format", "raw", "raw.img:/new"]), "new\n");
    std::fs::create_dir(bench.path("mounted")).expect("a directory");
    bench.does(&["mount", "--image-format", "raw", "raw.img", "mounted"]);
    let mounted = UnmountGuard(&bench);
    assert_eq!(std::fs::read(bench.path("mounted/new")).expect("a file"), b"new\n");
    drop(mounted);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "made", "200M"]);
    bench.does(&["mkfs", "--image-format", "qcow2", "made"]);
    bench.does(&["ls", "--image-format", "qcow2", "made:/"]);
    let said = bench.fails(&["ls", "--image-format", "raw", "made:/"], 1);
    assert!(said.contains("a qcow2 image, not btrfs"), "{said}");
    let said = bench.fails(&["ls", "--image-format", "qcow2", "new:/"], 1);
    assert!(said.contains("new: qcow2: "), "{said}");
    let said = bench.fails(&["mkfs", "--image-format", "qcow2", "x", "--size", "1G"], 1);
    assert!(said.contains("--size is for plain ones"), "{said}");
}

#[test]
fn snapshots_of_an_image_are_read_by_name_and_survive_writes() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    for options in ["compat=0.10", "extended_l2=on,compression_type=zstd"] {
        let _ = std::fs::remove_file(bench.path("made"));
        bench.qemu_img(&["convert", "-c", "-O", "qcow2", "-o", options, "disk.img", "made"]);
        bench.qemu_img(&["snapshot", "-c", "monday", "made"]);
        bench.does(&["rm", "made:/text"]);
        bench.does(&["cp", "raw.img:/text", "made:/later"]);
        bench.judge("made");
        assert!(bench.does(&["info", "made"]).contains("image snapshots    monday\n"));
        bench.is_same(&["--image-snapshot", "monday", "made"]);
        let words = ["cat", "--image-snapshot", "monday", "made:/text"];
        assert_eq!(bench.does(&words), "what the kernel wrote\n");
        let said = bench.fails(&["ls", "--image-snapshot", "sunday", "made"], 2);
        assert!(said.contains("no image snapshot is called sunday: it has monday"), "{said}");
        let said = bench.fails(&["mkdir", "--image-snapshot", "monday", "made:/x"], 2);
        assert!(said.contains("can only be read"), "{said}");
    }
}

/// A truncated image, and false headers, give an error.
#[test]
fn images_that_lie_are_refused() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    bench.qemu_img(&["convert", "-O", "qcow2", "disk.img", "made"]);
    let file = File::options().read(true).write(true).open(bench.path("made")).expect("an image");
    let mut header = [0; 104];
    file.read_exact_at(&mut header, 0).expect("a header");
    // Size, L1 entries, L1 offset, refcount clusters, cluster bits, snapshots.
    for (at, len) in [(24, 8), (36, 4), (40, 8), (56, 4), (20, 4), (60, 4), (8, 8)] {
        let mut bytes = header;
        bytes[at..at + len].fill(0xff);
        file.write_all_at(&bytes, 0).expect("a write");
        let output = bench.offshoot(&["ls", "made"]);
        assert_eq!(output.status.code(), Some(1), "bytes {at}: {output:?}");
    }
    file.write_all_at(&header, 0).expect("a write");
    bench.is_same(&["made"]);
    pipe("truncate", &["-s".as_ref(), "700K".as_ref(), bench.path("made").as_os_str()], b"");
    let output = bench.offshoot(&["ls", "made"]);
    assert!(matches!(output.status.code(), Some(1 | 3)), "{output:?}");
}

/// The process that serves a mount may not open files or change their sizes. The image still grows.
#[test]
fn an_image_is_mounted() {
    let Some(judges) = judges::require() else { return };
    let bench = KernelImage::new(&judges);
    bench.disk();
    bench.qemu_img(&["convert", "-c", "-O", "qcow2", "disk.img", "base.qcow2"]);
    let words = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "made"];
    bench.qemu_img(&words);
    let dir = bench.path("mounted");
    std::fs::create_dir(&dir).expect("a directory");
    bench.does(&["mount", "--backing", "made@1", "mounted"]);
    let mounted = UnmountGuard(&bench);
    let table = std::fs::read_to_string("/proc/self/mounts").expect("the table of mounts");
    assert!(table.contains("/made@1 "), "{table}");
    let big = vec![0x5a; 9 << 20];
    let file = File::create(dir.join("big")).expect("a file");
    file.write_all_at(&big, 0).expect("a write");
    file.sync_all().expect("it is stored");
    drop(file);
    assert_eq!(std::fs::read(dir.join("text")).expect("a file"), b"what the kernel wrote\n");
    std::fs::remove_file(dir.join("text")).expect("it goes");
    drop(mounted);
    bench.judge("made");
    let mount = bench.disks.mount("ro");
    assert!(std::fs::read(mount.path().join("big")).expect("it is there") == big);
    assert!(!mount.path().join("text").exists());
}

/// Unmounts `mounted` when it is dropped, also in a panic.
struct UnmountGuard<'a>(&'a KernelImage);

impl Drop for UnmountGuard<'_> {
    fn drop(&mut self) {
        let output = self.0.offshoot(&["unmount", "mounted"]);
        let said = String::from_utf8_lossy(&output.stderr);
        if !std::thread::panicking() {
            assert!(output.status.success(), "{said}");
        }
    }
}
