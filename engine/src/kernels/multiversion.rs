//! Compiles the row operations of `lanes` again for one instruction set and hands a backend the methods that call them.

/// The functions, with the features that `detect` of the surrounding module saw.
macro_rules! lanes_for {
    ($features:literal) => {
        #[target_feature(enable = $features)]
        fn softmax(row: &mut [f32]) {
            lanes::softmax(row);
        }

        #[target_feature(enable = $features)]
        fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, dst: &mut [f32]) {
            lanes::rms_norm(x, weight, epsilon, dst);
        }

        #[target_feature(enable = $features)]
        fn rope(row: &mut [f32], rotation: Rotation<'_>) {
            lanes::rope(row, rotation.cos, rotation.sin);
        }

        #[target_feature(enable = $features)]
        fn silu_mul(gate: &mut [f32], up: &[f32]) {
            lanes::silu_mul(gate, up);
        }

        #[target_feature(enable = $features)]
        fn narrow(values: &[f32], dst: &mut [bf16]) {
            lanes::narrow(values, dst);
        }

        #[target_feature(enable = $features)]
        fn quantise_row(x: &[f32], dst: &mut [i8]) -> (f32, i32) {
            lanes::quantise_row(x, dst)
        }
    };
}

/// The trait methods; to be used inside `impl Backend` of a type that exists only where the features were detected.
macro_rules! lanes_methods {
    () => {
        fn softmax(&self, row: &mut [f32]) {
            // SAFETY: `self` exists, so its features were detected.
            unsafe { softmax(row) }
        }

        fn rms_norm(&self, x: &[f32], weight: &[f32], epsilon: f32, dst: &mut [f32]) {
            // SAFETY: `self` exists, so its features were detected.
            unsafe { rms_norm(x, weight, epsilon, dst) }
        }

        fn rope(&self, row: &mut [f32], rotation: Rotation<'_>) {
            // SAFETY: `self` exists, so its features were detected.
            unsafe { rope(row, rotation) }
        }

        fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
            // SAFETY: `self` exists, so its features were detected.
            unsafe { silu_mul(gate, up) }
        }

        fn narrow(&self, values: &[f32], dst: &mut [bf16]) {
            // SAFETY: `self` exists, so its features were detected.
            unsafe { narrow(values, dst) }
        }

        fn quantise_row(&self, x: &[f32], dst: &mut [i8]) -> (f32, i32) {
            // SAFETY: `self` exists, so its features were detected.
            unsafe { quantise_row(x, dst) }
        }
    };
}
